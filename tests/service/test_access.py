"""Every route there is asks for the key, but those that are named here; and no other site's page gets in."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

import pytest
from starlette.routing import Route, Router, WebSocketRoute

from quire.service.http.static import page_files
from tests.service.asgi import Exchange, get, post
from tests.service.asgi_socket import Socket
from tests.service.conftest import Service
from tests.service.live import Live

OF_OPERATORS = {"/health", "/ready", "/startup", "/metrics", "/openapi.json", "/docs", "/version"}
PUBLIC = OF_OPERATORS | {path for path, _ in page_files()}
JSON = {"content-type": "application/json"}


def routes_of(service: Service) -> list[Any]:
    """As the app itself has them."""
    gate: Any = service.app
    router = gate._app
    assert isinstance(router, Router)
    return list(router.routes)


@pytest.mark.anyio
async def test_every_route_is_closed_but_the_public_ones(make_service: Callable[..., Service]) -> None:
    service = make_service(api_keys=("secret",))
    paths = set()
    for route in routes_of(service):
        path = route.path.replace("{name:path}", "tiny").replace("{id}", "x")
        paths.add(route.path)
        if isinstance(route, WebSocketRoute):
            socket = Socket(service.app)
            socket.scope["path"] = path
            task = socket.start().task
            assert task is not None
            await task
            assert (socket.sent[0]["type"], socket.sent[0]["status"]) == (
                "websocket.http.response.start",
                401,
            )
            continue
        assert isinstance(route, Route)
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "QUERY"):
            reply = await Exchange(service.app, method, path, b"{}", JSON).start().finish()
            assert (reply.status == 401) == (route.path not in PUBLIC), (method, path)
            assert reply.status < 500
    assert paths >= PUBLIC
    assert len(paths - PUBLIC) >= 7
    assert not service.engine.streams


@pytest.mark.parametrize(
    "path",
    [
        "/health/../v1/models",
        "/static/../v1/models",
        "/health/..%2fv1/models",
        "//v1/models",
        "/v1//models",
        "/v1/models/",
        "/V1/models",
        "/v1/models;/health",
        "/v1/models%00/health",
        "/v1/models?/health",
        "/v1/models#/health",
        "/health%2f..%2fv1%2fmodels",
    ],
)
def test_no_spelling_of_a_path_gets_around_the_key(live: Live, path: str) -> None:
    connection = HTTPConnection("127.0.0.1", live.port, timeout=30)
    connection.request("GET", path)
    reply = connection.getresponse()
    assert reply.status in (400, 401, 404)
    assert b"tiny" not in reply.read()
    connection.close()


@pytest.mark.anyio
async def test_keys_are_compared_as_digests_in_constant_time(
    make_service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them each time, whatever was given."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def recorded(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return compare(given, known)

    service = make_service(api_keys=("one", "two"))
    known = [hashlib.sha256(key).digest() for key in (b"one", b"two")]
    monkeypatch.setattr(hmac, "compare_digest", recorded)
    for given, status in (("one", 200), ("two", 200), ("on", 401), ("", 401), ("x" * 9999, 401)):
        compared.clear()
        reply = await get(service.app, "/v1/models", authorization=f"Bearer {given}")
        assert reply.status == status
        assert reply.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
        assert compared == [(hashlib.sha256(given.encode()).digest(), each) for each in known]


@pytest.mark.anyio
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:8000"])
async def test_no_site_is_let_read_or_write(service: Service, origin: str) -> None:
    """No CORS: a browser keeps answers from other sites' pages, and the preflight of JSON fails."""
    body = {"prompt": "a", "max_tokens": 1}
    replies = [
        await get(service.app, "/v1/models", origin=origin),
        await get(service.app, "/metrics", origin=origin),
        await post(service.app, "/v1/completions", body, origin=origin),
    ]
    preflight = {"origin": origin, "access-control-request-method": "POST"}
    preflight["access-control-request-headers"] = "content-type"
    replies.append(await Exchange(service.app, "OPTIONS", "/v1/completions", b"", preflight).start().finish())
    assert replies[-1].status == 405
    for reply in replies:
        assert not [name for name in reply.headers if name.startswith("access-control")]
    form = await post(service.app, "/v1/completions", body, content_type="text/plain", origin=origin)
    assert form.status == 415  # what a page may send without a preflight


@pytest.mark.anyio
async def test_page_may_load_nothing_from_elsewhere(service: Service) -> None:
    for path, _ in page_files():
        reply = await get(service.app, path)
        policy = dict(
            part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";")
        )
        assert policy.pop("default-src") == "'none'"
        assert {value for values in policy.values() for value in values.split()} <= {
            "'self'",
            "'none'",
            "data:",
        }
        assert policy["script-src"] == "'self'"
        assert "data:" not in policy["connect-src"]
