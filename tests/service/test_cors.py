"""Pages of other sites: those that are named may read everything, errors and streams too; others nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from quire.service.config import ServiceConfig
from tests.cluster.stub_replica import LiveRouter, StubReplica
from tests.service.asgi import Exchange, Reply, get, post
from tests.service.conftest import Service
from tests.service.live import Live

SITE = "https://chat.example"
KEY = {"authorization": "Bearer secret"}
PATH = "/v1/completions"
BODY = {"prompt": "ab", "max_tokens": 2}
Make = Callable[..., Service]


async def preflight(service: Service, origin: str = SITE, **more: str) -> Reply:
    headers = {"origin": origin, "access-control-request-method": "POST"}
    headers["access-control-request-headers"] = "authorization,content-type,x-stainless-os"
    headers |= {name.replace("_", "-"): value for name, value in more.items()}
    return await Exchange(service.app, "OPTIONS", PATH, b"", headers).start().finish()


@pytest.mark.anyio
@pytest.mark.parametrize("origins", [(SITE,), ("http://other.example:3000", SITE), ("*",)])
async def test_named_sites_may_read(make_service: Make, origins: tuple[str, ...]) -> None:
    """What fails as well: a page has to know why."""
    service = make_service(api_keys=("secret",), cors_origins=origins, auto=True)
    allowed = "*" if origins == ("*",) else SITE
    asked = await preflight(service)
    assert (asked.status, asked.headers["access-control-allow-origin"]) == (200, allowed)
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert "POST" in asked.headers["access-control-allow-methods"]
    replies = {
        200: await post(service.app, PATH, BODY, origin=SITE, **KEY),
        401: await post(service.app, PATH, BODY, origin=SITE),
        404: await get(service.app, "/nowhere", origin=SITE, **KEY),
        405: await get(service.app, PATH, origin=SITE, **KEY),
        415: await post(service.app, PATH, BODY, origin=SITE, content_type="text/plain", **KEY),
    }
    stream = await post(service.app, PATH, BODY | {"stream": True}, origin=SITE, **KEY)
    assert stream.events[-1] == "[DONE]"
    service.engine.die("gone")
    replies[503] = await post(service.app, PATH, BODY, origin=SITE, **KEY)
    for status, reply in (*replies.items(), (200, stream)):
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, allowed)
        assert "access-control-allow-credentials" not in reply.headers
        assert "X-Request-Id" in reply.headers["access-control-expose-headers"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://chat.example", f"{SITE}:8443", f"{SITE}.evil.example", "null"]
)
async def test_other_sites_may_not(make_service: Make, origin: str) -> None:
    service = make_service(cors_origins=(SITE,))
    assert (await preflight(service, origin)).status == 400
    for reply in (await preflight(service, origin), await get(service.app, "/v1/models", origin=origin)):
        assert "access-control-allow-origin" not in reply.headers


@pytest.mark.anyio
async def test_hosts_are_checked_as_ever(make_service: Make) -> None:
    """A name that resolves to this machine is no named site."""
    service = make_service(cors_origins=("*",))
    reply = await get(service.app, "/v1/models", origin=SITE, host="evil.example")
    assert (reply.status, reply.error["code"]) == (400, "invalid_host")


@pytest.mark.parametrize(
    ("given", "kept"),
    [("https://A.example", "https://a.example"), ("https://a.example:443", "https://a.example")]
    + [(same, same) for same in ("*", "http://[::1]:3000", "http://localhost:5173", "app://obsidian.md")],
)
def test_origins_are_as_browsers_spell_them(given: str, kept: str) -> None:
    assert ServiceConfig(served_model_names=("m",), cors_origins=(given,)).cors_origins == (kept,)


@pytest.mark.parametrize(
    "origins", [("null",), ("",), ("a.example",), (f"{SITE}/",), (f"{SITE}/a",), ("*", SITE)]
)
def test_other_things_are_refused(origins: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="--cors-origin"):
        ServiceConfig(served_model_names=("m",), cors_origins=origins)


def opened(port: int, origin: str) -> int:
    """The status of a WebSocket's handshake."""
    try:
        with connect(f"ws://127.0.0.1:{port}/v1/responses", origin=origin):  # type: ignore[arg-type]
            return 101
    except InvalidStatus as refused:
        return refused.response.status_code


@pytest.mark.parametrize(("origins", "status"), [((), 403), ((SITE,), 101), (("*",), 101)])
def test_a_named_sites_page_may_open_a_websocket(
    make_live: Callable[..., Live], origins: tuple[str, ...], status: int
) -> None:
    live = make_live(cors_origins=origins)
    assert opened(live.port, SITE) == status
    assert opened(live.port, "https://evil.example") == (101 if origins == ("*",) else 403)


def test_the_router_does_the_same(make_live: Callable[..., Live]) -> None:
    """Whatever its replicas think of the site."""
    seen: list[dict[str, Any]] = []

    def say(exchange: Any) -> None:
        seen.append(exchange.headers)
        exchange.reply(200, b"{}", access_control_allow_origin="https://evil.example")

    replica, live = StubReplica(say), make_live()
    router, sockets = LiveRouter([replica], cors_origins=(SITE,)), LiveRouter([live], cors_origins=(SITE,))
    closed = LiveRouter([replica])
    try:
        for server, allowed in ((router, SITE), (closed, None)):
            for method, path in (("GET", "/v1/models"), ("GET", "/health")):
                reply = httpx.request(method, f"{server.url}{path}", headers={"origin": SITE}, timeout=30)
                if allowed is not None:
                    assert reply.headers.get_list("access-control-allow-origin") == [allowed]
        assert not any("origin" in {name.lower() for name in headers} for headers in seen)
        headers = {"origin": SITE, "access-control-request-method": "POST"}
        assert httpx.options(f"{router.url}{PATH}", headers=headers, timeout=30).status_code == 200
        assert opened(sockets.port, SITE) == 101
        assert opened(sockets.port, "https://evil.example") == 403
    finally:
        for each in (router, sockets, closed):
            each.end()
        replica.close()
