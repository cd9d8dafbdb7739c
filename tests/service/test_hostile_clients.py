"""Sockets that misbehave in every way we know, while sixteen streams go on as if nothing were."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Callable, Iterator

import httpx
import pytest

from service.tokenizer import Tokenizer
from tests.service.live import Live

STREAMS = 16
TOKENS = 120
HEADER_LIMIT = 16 << 10
BODY_LIMIT = 1 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Attacker:
    """Opens sockets to one server, and closes all of them at the end."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.sockets = contextlib.ExitStack()

    def connect(self) -> socket.socket:
        return self.sockets.enter_context(socket.create_connection(("127.0.0.1", self._port), timeout=30))

    def send(self, data: bytes) -> socket.socket:
        """On a connection of its own. A server that cuts it meanwhile is right to."""
        connection = self.connect()
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(data)
        return connection

    def ask(self, body: bytes, headers: bytes = b"") -> socket.socket:
        return self.send(HEAD + headers + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))


def answer(connection: socket.socket) -> bytes:
    """Until the server closes; the socket's own timeout is the test's failure."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            data += part
    return data


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def says_nothing(attacker: Attacker) -> None:
    assert answer(attacker.connect()) == b""


def trickles_its_headers(attacker: Attacker) -> None:
    connection = attacker.connect()
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        for byte in b"GET / HTTP/1.1\r\n" + b"X: " + b"x" * 10_000:
            connection.sendall(bytes([byte]))
            connection.settimeout(0.02)
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1):
                    return
    assert answer(connection) == b""


def trickles_its_body(attacker: Attacker) -> None:
    connection = attacker.send(HEAD + b"Content-Length: 1000\r\n\r\n{")
    assert answer_with(connection, b"408")


def promises_a_giant_body(attacker: Attacker) -> None:
    assert answer_with(attacker.send(HEAD + b"Content-Length: 99999999999\r\n\r\n"), b"413")


def sends_a_giant_body_in_chunks(attacker: Attacker) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    assert answer_with(attacker.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 40), b"413")


def sends_giant_headers(attacker: Attacker) -> None:
    assert (
        answer(attacker.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (4 * HEADER_LIMIT))) == b""
    )
    many = b"".join(b"X-%d: x\r\n" % at for at in range(HEADER_LIMIT // 4))
    assert answer(attacker.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + many)) == b""
    assert answer(attacker.send(b"GET /" + b"x" * (4 * HEADER_LIMIT))) == b""


def nests_without_end(attacker: Attacker) -> None:
    for opening in (b"[", b'{"a":', b'[{"prompt":'):
        assert answer_with(attacker.ask(b'{"prompt":' + opening * 50_000), b"400")


def sends_odd_json(attacker: Attacker) -> None:
    for body in (
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": 1e999}',
        b'{"prompt":"a","n":1' + b"0" * 5000,
        b"",
    ):
        assert answer_with(attacker.ask(body), b"400")


def speaks_something_else(attacker: Attacker) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00" * 500,
    ):
        assert answer(attacker.send(data))[:12] in (b"", b"HTTP/1.1 400")


def smuggles(attacker: Attacker) -> None:
    both = HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET
    assert answer(attacker.send(both)).startswith(b"HTTP/1.1 400")
    twice = HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345"
    assert answer(attacker.send(twice)).startswith(b"HTTP/1.1 400")


def pipelines(attacker: Attacker) -> None:
    connection = attacker.send(GET * 300 + GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert answer(connection).count(b'{"status":"ok"}') == 301


def resets_amid_its_body(attacker: Attacker) -> None:
    for at in range(20):
        reset(attacker.send(HEAD + b"Content-Length: 1000\r\n\r\n" + b"x" * at))


def closes_its_half(attacker: Attacker) -> None:
    connection = attacker.send(HEAD + b"Content-Length: 1000\r\n\r\n{")
    connection.shutdown(socket.SHUT_WR)
    assert answer(connection) == b""


def holds_five_hundred_idle_connections(attacker: Attacker) -> None:
    for _ in range(500):
        attacker.connect()


ATTACKS = [
    holds_five_hundred_idle_connections,  # they stay while the others come
    says_nothing,
    trickles_its_headers,
    trickles_its_body,
    promises_a_giant_body,
    sends_a_giant_body_in_chunks,
    sends_giant_headers,
    nests_without_end,
    sends_odd_json,
    speaks_something_else,
    smuggles,
    pipelines,
    resets_amid_its_body,
    closes_its_half,
]


def answer_with(connection: socket.socket, status: bytes) -> bool:
    """Whether the answer, after which the connection may stay open, has this status and says why in JSON."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while b"}}" not in data and (part := connection.recv(65536)):
            data += part
    return data.startswith(b"HTTP/1.1 " + status) and b'{"error":{"message":"' in data


@contextlib.contextmanager
def streams(live: Live) -> Iterator[list[socket.socket]]:
    """Each has had its first token."""
    attacker = Attacker(live.port)
    with attacker.sockets:
        running = []
        for at in range(STREAMS):
            body = {"prompt": f"{at:02}", "max_tokens": TOKENS, "stream": True}
            running.append(attacker.ask(json.dumps(body).encode(), b"Connection: close\r\n"))
        live.wait(lambda: len(live.engine.streams) == STREAMS)
        live.call(live.engine.step)
        yield running


@pytest.fixture(scope="module")
def guarded(tokenizer: Tokenizer) -> Iterator[Live]:
    live = Live(
        tokenizer, auto=False, receive_timeout=0.5, max_header_bytes=HEADER_LIMIT, max_body_bytes=BODY_LIMIT
    )
    yield live
    assert live.end() == 0


def test_streams_go_on_unharmed(guarded: Live, tokenizer: Tokenizer) -> None:
    live = guarded
    attacker = Attacker(live.port)
    with streams(live) as running, attacker.sockets:
        steps = 1
        for attack in ATTACKS:
            attack(attacker)
            assert httpx.get(f"{live.url}/health", timeout=30).status_code == 200, attack
            assert len(live.engine.active) == STREAMS, attack
            for _ in range(TOKENS // len(ATTACKS)):
                live.call(live.engine.step)
                steps += 1
        for _ in range(TOKENS - steps):
            live.call(live.engine.step)
        for at, connection in enumerate(running):
            data = answer(connection)
            assert data.startswith(b"HTTP/1.1 200 OK")
            events = [part.split(b"\n\n")[0] for part in data.split(b"data: ")[1:]]
            assert events.pop() == b"[DONE]"
            choices = [json.loads(event)["choices"][0] for event in events]
            tokens = tokenizer.encode(f"{at:02}", add_special_tokens=True)
            expected = tokenizer.decode((tokens * TOKENS)[:TOKENS], skip_special_tokens=True)
            assert "".join(choice["text"] for choice in choices) == expected
            assert choices[-1]["finish_reason"] == "length"
    live.wait(lambda: not live.server.server_state.connections)
    assert live.server.state.waiting.prompts == 0
    assert not live.server.state.generations
    assert len(live.engine.streams) == STREAMS  # no attack got as far as the engine


def test_readers_that_reset_or_half_close_amid_a_stream_are_aborted(make_live: Callable[..., Live]) -> None:
    live = make_live(auto=False)
    with streams(live) as running:
        for connection in running[:4]:
            reset(connection)
        for connection in running[4:8]:
            connection.shutdown(socket.SHUT_WR)
        live.wait(lambda: sum(stream.aborted for stream in live.engine.streams) == 8)
        for _ in range(TOKENS - 1):
            live.call(live.engine.step)
        for connection in running[8:]:
            assert b"data: [DONE]" in answer(connection)
    assert sum(stream.aborted for stream in live.engine.streams) == 8
