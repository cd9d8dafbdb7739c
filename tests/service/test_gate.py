"""Who may ask, from where, with what."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable

import pytest

from quire.service.config import ServiceConfig
from tests.service.asgi import Exchange, Reply, get, post
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio
PUBLIC = ["/", "/static/main.js", "/health", "/ready", "/metrics", "/openapi.json"]
KEYED = ["/v1/models", "/v1/models/tiny", "/nowhere", "/v1/completions", "/tokenize", "/healthz", "/health/"]
BODY = {"prompt": "a", "max_tokens": 1}


async def test_public_and_keyed_paths(make_service: Callable[..., Service]) -> None:
    service = make_service(api_keys=("secret", "other"))
    for path in PUBLIC:
        assert (await get(service.app, path)).status == 200, path
    for path in KEYED:
        reply = await get(service.app, path)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("given", ["secret", "other"])
async def test_right_keys(make_service: Callable[..., Service], given: str) -> None:
    service = make_service(api_keys=("secret", "other"))
    for scheme in ("Bearer", "bearer"):
        assert (await get(service.app, "/v1/models", authorization=f"{scheme} {given}")).status == 200


@pytest.mark.parametrize(
    "header", ["", "secret", "Bearer", "Bearer ", "Bearer Secret", "Bearer secret2", "Basic secret"]
)
async def test_wrong_keys(make_service: Callable[..., Service], header: str) -> None:
    service = make_service(api_keys=("secret",))
    assert (await get(service.app, "/v1/models", authorization=header)).status == 401
    assert (await post(service.app, "/v1/completions", BODY, authorization=header)).status == 401
    assert not service.engine.streams


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("LOCALHOST", 200),
        ("evil.example:8000", 400),
        ("localhost.evil.example", 400),
        ("", 400),
    ],
)
async def test_hosts_without_a_key(service: Service, host: str, status: int) -> None:
    """A page that resolves its own name to this machine (DNS rebinding) gets nothing."""
    for path in ("/v1/models", "/health"):
        reply = await get(service.app, path, host=host)
        assert reply.status == status
        if status == 400:
            assert reply.error["param"] == "host"
            assert repr(host.partition(":")[0]) in reply.error["message"]


async def test_any_host_with_a_key(make_service: Callable[..., Service]) -> None:
    service = make_service(api_keys=("k",), host="0.0.0.0")
    assert (await get(service.app, "/v1/models", host="llm.example", authorization="Bearer k")).status == 200


def test_open_to_others_only_with_a_key_or_by_will() -> None:
    with pytest.raises(ValueError, match="--api-key"):
        ServiceConfig(served_model_names=("m",), host="0.0.0.0")
    ServiceConfig(served_model_names=("m",), host="0.0.0.0", insecure=True)
    ServiceConfig(served_model_names=("m",), host="0.0.0.0", api_keys=("k",))


@pytest.mark.parametrize(
    ("given", "kept"), [("abc.D-1_2", True), ("x" * 64, True), ("x" * 65, False), ("a b", False)]
)
async def test_request_id(service: Service, given: str, kept: bool) -> None:
    for path in ("/health", "/nowhere"):
        reply = await get(service.app, path, x_request_id=given)
        assert (reply.headers["x-request-id"] == given) == kept
        assert reply.headers["x-request-id"]


async def test_anthropics_clients_find_the_request_id_where_they_look(service: Service) -> None:
    for path, has in (("/v1/messages", True), ("/v1/messages/count_tokens", True), ("/v1/models", False)):
        reply = await post(service.app, path, {"model": "tiny"})
        assert reply.headers.get("request-id") == (reply.headers["x-request-id"] if has else None)


async def test_request_ids_differ(service: Service) -> None:
    ids = {(await get(service.app, "/health")).headers["x-request-id"] for _ in range(5)}
    assert len(ids) == 5


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("text/plain", 415),
        ("application/jsonx", 415),
        ("application/x-www-form-urlencoded", 415),
        ("", 415),
    ],
)
async def test_content_type(service: Service, kind: str, status: int) -> None:
    reply = await post(service.app, "/v1/completions", BODY, content_type=kind)
    assert reply.status == status


async def test_compressed_bodies_are_refused(service: Service) -> None:
    reply = await post(service.app, "/v1/completions", BODY, content_encoding="gzip")
    assert (reply.status, reply.error["param"]) == (415, "content-encoding")


async def post_parts(service: Service, parts: list[bytes], *, whole: bool = True) -> Reply:
    headers = {"content-type": "application/json"}
    running = Exchange(service.app, "POST", "/v1/completions", parts, headers, whole=whole)
    return await running.start().finish()


async def test_large_body_is_refused_while_it_comes(make_service: Callable[..., Service]) -> None:
    service = make_service(max_body_bytes=1000)
    reply = await post_parts(service, [b" " * 400] * 3, whole=False)  # the rest never comes
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")
    reply = await post(service.app, "/v1/completions", BODY, content_length="1001")
    assert reply.status == 413
    body = b'{"prompt": "a", "max_tokens": 1}'
    assert (await post_parts(service, [body.ljust(990)])).status == 200


async def test_long_prompt_is_refused(make_service: Callable[..., Service]) -> None:
    service = make_service(max_prompt_bytes=10)
    assert (await post(service.app, "/v1/completions", {"prompt": "é" * 5, "max_tokens": 1})).status == 200
    reply = await post(service.app, "/v1/completions", {"prompt": "é" * 6, "max_tokens": 1})
    assert (reply.status, reply.error["param"]) == (413, "prompt")


async def test_body_of_too_many_values_is_not_even_decoded(service: Service) -> None:
    for count, status in (((1 << 20) + 5000, 413), (1 << 20, 400)):  # the second is only too long a prompt
        body = b'{"prompt": [' + b"1," * count + b"1]}"
        reply = await post(service.app, "/v1/completions", body)
        assert reply.status == status


async def test_body_that_never_ends(make_service: Callable[..., Service]) -> None:
    service = make_service(receive_timeout=0.02)
    reply = await post_parts(service, [b"{"], whole=False)
    assert (reply.status, reply.error["code"]) == (408, "receive_timeout")


async def test_client_that_is_silent_after_its_body_may_be(make_service: Callable[..., Service]) -> None:
    service = make_service(receive_timeout=0.02, auto=False)
    headers = {"content-type": "application/json"}
    body = b'{"prompt": "a", "max_tokens": 1}'
    running = Exchange(service.app, "POST", "/v1/completions", body, headers).start()
    await asyncio.sleep(0.06)
    service.engine.step()
    assert (await running.finish()).status == 200


async def test_client_that_leaves_amid_its_body(service: Service) -> None:
    headers = {"content-type": "application/json"}
    running = Exchange(service.app, "POST", "/v1/completions", b"{", headers, whole=False).start()
    running.leave()
    assert running.task is not None
    await running.task
    assert running.sent == []


async def test_giant_headers_that_come_at_once(make_service: Callable[..., Service]) -> None:
    limit = 1000
    service = make_service(max_header_bytes=limit)
    assert (await get(service.app, "/health", x="y" * (limit // 2))).status == 200
    query = Exchange(service.app, "GET", "/health")
    query.scope["query_string"] = b"y" * limit
    for reply in (
        await get(service.app, "/health", x="y" * limit),
        await get(service.app, "/" + "y" * limit),
        await query.start().finish(),
    ):
        assert (reply.status, reply.error["code"]) == (431, "headers_too_large")


async def test_head(service: Service) -> None:
    assert (await Exchange(service.app, "HEAD", "/health").start().finish()).status == 200


async def test_unknown_paths_and_methods(service: Service) -> None:
    reply = await get(service.app, "/nowhere")
    assert (reply.status, reply.error["message"]) == (404, "there is no /nowhere")
    for path in ("/page/index.html", "/../service/app.py", "/%2e%2e/app.py", "/index.html", "/app.py", "/v1"):
        assert (await get(service.app, path)).status == 404, path
    reply = await get(service.app, "/v1/completions")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    reply = await post(service.app, "/health", {})
    assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")
    assert reply.error["message"] == "/health does not take POST, but GET"


async def test_page(service: Service) -> None:
    reply = await get(service.app, "/")
    assert reply.headers["content-type"].startswith("text/html")
    assert reply.headers["content-security-policy"] == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    assert reply.headers["x-content-type-options"] == "nosniff"
    for name in ("main.js", "vendor/markdown-it-15.0.3/markdown-it.esm.min.mjs"):
        script = await get(service.app, f"/static/{name}")
        assert script.headers["content-type"].startswith("text/javascript")
    assert (await get(service.app, "/static/page.css")).headers["content-type"].startswith("text/css")


@pytest.mark.parametrize("path", ["/", "/static/main.js"])
async def test_a_file_of_the_page_comes_once_and_compressed(service: Service, path: str) -> None:
    plain = await get(service.app, path, accept_encoding="br, gzip;q=0")
    assert "content-encoding" not in plain.headers
    packed = await get(service.app, path, accept_encoding="br, gzip;q=0.8")
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    assert plain.headers["vary"] == packed.headers["vary"] == "accept-encoding"
    tag = packed.headers["etag"]
    again = await get(service.app, path, if_none_match=f'"other", {tag}')
    assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
    assert (await get(service.app, path, if_none_match='W/"other"')).status == 200


async def test_bug_of_ours_is_a_500_in_words(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(service.engine, "add", broken)
    with pytest.raises(ZeroDivisionError):  # for the server's log
        await post(service.app, "/v1/completions", BODY)
    assert service.state.queue.prompts == 0
