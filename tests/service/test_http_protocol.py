"""Sockets that try to hold a connection or its memory, or to pass for others: trailers, doubles, silence."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.service.config import ServiceConfig
from quire.service.http.lifecycle import OrderlyServer
from quire.service.state import ServerState
from tests.server_thread import ServerThread
from tests.service.live import Live
from tests.service.test_server import received, request_bytes

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
KEY = b"Authorization: Bearer key\r\n"
BODY = b'{"prompt": "ab", "max_tokens": 2}'
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"
OK = b'{"status":"ok"}'


@contextlib.contextmanager
def raw(live: ServerThread) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", live.port), 30) as connection:
        yield connection


@pytest.mark.parametrize("trailer", [KEY, b"Host: evil.example\r\n" + KEY, b"X: y\r\n" + KEY + KEY])
def test_a_key_in_a_trailer_opens_nothing(live: Live, trailer: bytes) -> None:
    with raw(live) as connection:
        connection.sendall(POST + CHUNKED + CHUNK + b"0\r\n" + trailer + b"\r\n")
        assert received(connection, b"}}").startswith(b"HTTP/1.1 401")


def test_a_trailer_changes_nothing(live: Live) -> None:
    """It may overwrite no header, and the next request on the connection is read from its beginning."""
    request = POST + KEY + CHUNKED + CHUNK + b"0\r\nContent-Type: text/plain\r\nHost: evil.example\r\n\r\n"
    with raw(live) as connection:
        for _ in range(2):
            connection.sendall(request)
            assert received(connection, b'"usage"').startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("key", [b"", KEY])
@pytest.mark.parametrize("part", [b"X-Trailer: y\r\n", b"x"])
def test_a_trailer_without_end_is_cut(make_live: Callable[..., Live], key: bytes, part: bytes) -> None:
    live = make_live(api_keys=("key",), max_header_bytes=16 << 10)
    beginning = b"" if part.endswith(b"\n") else b"X: "  # many of them, or a long one
    with raw(live) as connection:
        connection.sendall(POST + key + CHUNKED + CHUNK + b"0\r\n" + beginning)
        sent, block = 0, part * (4096 // len(part))
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while sent < 64 << 20:
                connection.sendall(block)
                sent += len(block)
        assert sent < 64 << 20
        live.wait(lambda: not live.server.server_state.connections)


@pytest.mark.parametrize("header", ["Authorization: Bearer key", "Host: localhost", "Host: evil.example"])
@pytest.mark.parametrize("first", [True, False])
def test_doubled_headers_are_refused(live: Live, header: str, first: bool) -> None:
    """A proxy in front may have gone by the other one."""
    own = ["Authorization: Bearer key", "Host: localhost"]
    headers = "\r\n".join([header, *own] if first else [*own, header])
    with raw(live) as connection:
        connection.sendall(f"GET /v1/models HTTP/1.1\r\n{headers}\r\n\r\n".encode())
        reply = received(connection, b"}}")
    assert reply.startswith(b"HTTP/1.1 400")
    assert header.partition(":")[0].lower().encode() in reply


def test_who_never_ends_a_request_holds_no_connection(make_live: Callable[..., Live]) -> None:
    live = make_live(receive_timeout=0.5, max_connections=20)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(raw(live))
            connection.sendall(HEALTH)
            received(connection, OK)
            connection.sendall(b"x")
        live.wait(lambda: not live.server.server_state.connections)
        assert httpx.get(f"{live.url}/health", timeout=30).status_code == 200


def test_who_ends_a_request_after_its_answer_and_is_silent_holds_no_connection(
    make_live: Callable[..., Live],
) -> None:
    live = make_live(receive_timeout=30.0)
    live.server.config.timeout_keep_alive = 1
    with raw(live) as connection:
        connection.sendall(HEALTH)
        received(connection, OK)
        connection.sendall(b"0123456789")
        live.wait(lambda: not live.server.server_state.connections)


def test_who_ends_a_request_after_its_answer_may_ask_again(make_live: Callable[..., Live]) -> None:
    """However often, and whatever timers ran meanwhile."""
    live = make_live(receive_timeout=0.5, auto=False)
    live.server.config.timeout_keep_alive = 1
    with raw(live) as connection:
        for _ in range(3):
            connection.sendall(HEALTH)
            received(connection, OK)
            connection.sendall(b"0123456789")
        connection.sendall(request_bytes({"prompt": "ab", "max_tokens": 1}))
        live.wait(lambda: bool(live.engine.streams))
        live.idle(1.5)  # the answer takes longer than each of them
        live.call(live.engine.step)
        assert received(connection, b'"usage"').startswith(b"HTTP/1.1 200")


LAST = HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


OFFERS = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
)


@pytest.mark.parametrize(
    "framing", [b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY, CHUNKED + CHUNK + b"0\r\n\r\n"]
)
def test_an_offer_of_http_2_is_declined(live: Live, framing: bytes) -> None:
    """As Java's client makes it: the request is answered as any other, wherever it is cut."""
    request = POST + KEY + OFFERS + framing
    with raw(live) as connection:
        for cut in (0, 10, len(POST + KEY + OFFERS) + 1, request.index(BODY), request.index(BODY) + 3):
            connection.sendall(request[:cut])
            live.idle(0.05)
            connection.sendall(request[cut:])
            answer = received(connection, b"}}}")
            assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "data", [b"nonsense\r\n\r\n", POST + b"Content-Length: x\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n"]
)
def test_what_is_no_request_is_refused_as_an_api_refuses(live: Live, data: bytes) -> None:
    with raw(live) as connection:
        connection.sendall(data)
        head, body = received(connection, b"}}").split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"content-type: application/json" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("expects", [b"", b"Expect: 100-continue\r\n"])
def test_http_1_0_gets_no_chunks(live: Live, streamed: bool, expects: bytes) -> None:
    """It knows none, nor a 100: the end of a stream is that of its connection."""
    body = json.dumps({"prompt": "ab", "max_tokens": 3, "stream": streamed}).encode()
    head = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + KEY + expects + b"Content-Length: %d\r\n\r\n" % len(body)
    with raw(live) as connection:
        connection.sendall(head + body)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, said = answer.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding" not in head
    assert b"connection: close" in head.split(b"\r\n")
    if streamed:
        assert said.startswith(b"data: {") and said.endswith(b"\n\ndata: [DONE]\n\n") and b"\r" not in said
        assert b"content-length" not in head
    else:
        assert json.loads(said)["usage"]["completion_tokens"] == 3


def test_a_large_answer_of_http_1_0_is_whole(live: Live) -> None:
    with raw(live) as connection:
        connection.sendall(b"GET /openapi.json HTTP/1.0\r\nHost: localhost\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert "/v1/completions" in json.loads(answer.split(b"\r\n\r\n", 1)[1])["paths"]


def ask_last(live: Live, connection: socket.socket) -> None:
    """Send a request but for its body, and wait until it is answered."""
    before = live.server.server_state.total_requests
    connection.sendall(LAST)
    live.wait(lambda: live.server.server_state.total_requests > before)


def test_who_still_sends_gets_the_last_answer(live: Live) -> None:
    """What comes on a closed connection has it reset, and with it goes an answer that was not read yet."""
    with raw(live) as connection:
        ask_last(live, connection)
        connection.sendall(b"01234")
        connection.sendall(b"56789")
        assert b"connection: close\r\n" in received(connection, OK)
        assert connection.recv(1) == b""
    live.wait(lambda: not live.server.server_state.connections)


def test_what_follows_a_last_request_is_not_answered(live: Live) -> None:
    with raw(live) as connection:
        ask_last(live, connection)
        asked = live.server.server_state.total_requests
        connection.sendall(b"0123456789" + HEALTH)
        live.wait(lambda: not live.server.server_state.connections)
    assert live.server.server_state.total_requests == asked


def test_who_never_ends_a_last_request_holds_no_connection(make_live: Callable[..., Live]) -> None:
    live = make_live(receive_timeout=0.5)
    with raw(live) as connection:
        connection.sendall(LAST)
        assert received(connection, OK)
        connection.sendall(b"x")
        live.wait(lambda: not live.server.server_state.connections)


SIZE = 16 << 20  # more than a system takes for a socket that nobody reads


async def say_much(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(b"x" * SIZE)(scope, receive, send)


class Talkative(ServerThread):
    """Answers everything at length, and at once."""

    def __init__(self, **config: Any) -> None:
        settings = ServiceConfig(served_model_names=("tiny",), port=0, **config)
        super().__init__(OrderlyServer(say_much, settings, ServerState(settings)), lambda: True)


@pytest.fixture
def talkative() -> Iterator[Callable[..., Talkative]]:
    made: list[Talkative] = []

    def make(**config: Any) -> Talkative:
        made.append(Talkative(**config))
        return made[-1]

    yield make
    for server in made:
        server.end()


def ask_without_reading(server: ServerThread, connection: socket.socket, more: bytes = b"") -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + more)
    server.wait(lambda: server.server.server_state.total_requests > 0)


@pytest.mark.parametrize("more", [b"", b"\0\0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 9])
def test_who_does_not_read_an_answer_is_cut(talkative: Callable[..., Talkative], more: bytes) -> None:
    """Nor does it help to ask for more, or to break the protocol, which closes when all has been read."""
    server = talkative(send_timeout=0.05)
    with raw(server) as connection:
        ask_without_reading(server, connection, more)
        server.wait(lambda: not server.server.server_state.connections)


def test_who_is_told_to_close_and_does_not_read_is_cut(talkative: Callable[..., Talkative]) -> None:
    server = talkative(send_timeout=0.05)
    with raw(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        server.wait(lambda: server.server.server_state.total_requests > 0)
        server.wait(lambda: not server.server.server_state.connections)


def test_a_drain_waits_until_an_answer_is_read(talkative: Callable[..., Talkative]) -> None:
    server = talkative()
    with raw(server) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        body = received(connection, b"\r\n\r\n").partition(b"\r\n\r\n")[2]
        server.server.stop_soon()
        threading.Event().wait(1.5)  # longer than the server else leaves anybody
        size = len(body)
        while size < SIZE and (part := connection.recv(1 << 20)):
            size += len(part)
    assert size == SIZE
    server.thread.join(20)
    assert server.end() == 0


def test_who_reads_late_gets_all_of_a_large_answer(talkative: Callable[..., Talkative]) -> None:
    server = talkative(send_timeout=1.0)  # for each MiB that waits
    with raw(server) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        threading.Event().wait(2.5)
        head, _, body = received(connection, b"\r\n\r\n").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        size = len(body)
        while size < SIZE and (part := connection.recv(1 << 20)):
            size += len(part)
    assert size == SIZE
