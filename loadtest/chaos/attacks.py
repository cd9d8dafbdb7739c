"""Sockets that misbehave in every way we know. Each attack raises Harm if the server does not stand it."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
STRANGER = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CLOSE = b"\r\nConnection: close\r\n\r\n"


class Harm(Exception):
    """A server did not refuse what it should, or not as it should."""


def expect(condition: object, what: str) -> None:
    if not condition:
        raise Harm(what)


class Attacker:
    """Opens sockets to one server, and closes all of them at the end.

    max_header_bytes, max_body_bytes: the server's limits. patience: seconds that it may take to cut a client.
    key: of a tenant, if the server asks for one.
    """

    def __init__(
        self, port: int, max_header_bytes: int, max_body_bytes: int, patience: float = 30.0, key: str = ""
    ) -> None:
        self.max_header_bytes, self.max_body_bytes = max_header_bytes, max_body_bytes
        self.sockets = contextlib.ExitStack()
        self.patience = patience
        self.authorization = b"Authorization: Bearer " + key.encode() + b"\r\n" if key else b""
        self.head = STRANGER + self.authorization
        self.port = port

    def connect(self) -> socket.socket:
        address = ("127.0.0.1", self.port)
        return self.sockets.enter_context(socket.create_connection(address, timeout=self.patience))

    def send(self, data: bytes) -> socket.socket:
        """Send on a connection of its own. A server that cuts it meanwhile is right to."""
        connection = self.connect()
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(data)
        return connection

    def ask(self, body: bytes, headers: bytes = b"") -> socket.socket:
        return self.send(self.head + headers + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))


Attack = Callable[[Attacker], None]


def answer(connection: socket.socket) -> bytes:
    """Read until the server closes. Raise Harm if it does not."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        try:
            while part := connection.recv(65536):
                data += part
        except TimeoutError:
            raise Harm(f"the connection was still open after {connection.gettimeout():g} s") from None
    return data


def expect_refusal(connection: socket.socket, status: bytes) -> None:
    """Check that the answer has this status and says why in JSON; the connection may stay open then."""
    data = b""
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        while b"}}" not in data and (part := connection.recv(65536)):
            data += part
    good = data.startswith(b"HTTP/1.1 " + status) and b'{"error":{"message":"' in data
    expect(good, f"it should say {status.decode()} and why, and says {data[:200]!r}")


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def says_nothing(attacker: Attacker) -> None:
    expect(answer(attacker.connect()) == b"", "a silent client got an answer")


def trickles_its_headers(attacker: Attacker) -> None:
    connection = attacker.connect()
    until = time.monotonic() + attacker.patience
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        for byte in b"GET / HTTP/1.1\r\n" + b"X: " + b"x" * attacker.max_header_bytes:
            if time.monotonic() > until:
                break
            connection.sendall(bytes([byte]))
            connection.settimeout(0.02)
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1):
                    return
    connection.settimeout(attacker.patience)
    expect(answer(connection) == b"", "headers that trickle got an answer")


def trickles_its_body(attacker: Attacker) -> None:
    connection = attacker.send(attacker.head + b"Content-Length: 1000\r\n\r\n{")
    expect_refusal(connection, b"408")


def promises_a_giant_body(attacker: Attacker) -> None:
    expect_refusal(attacker.send(attacker.head + b"Content-Length: 99999999999\r\n\r\n"), b"413")


def sends_a_giant_body_in_chunks(attacker: Attacker) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    many = chunk * (2 * attacker.max_body_bytes // 65536 + 8)
    expect_refusal(attacker.send(attacker.head + b"Transfer-Encoding: chunked\r\n\r\n" + many), b"413")


def sends_giant_headers(attacker: Attacker) -> None:
    size = attacker.max_header_bytes
    many = b"".join(b"X-%d: x\r\n" % at for at in range(size // 4))
    for request in (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (4 * size),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + many,
        b"GET /" + b"x" * (4 * size),
    ):
        expect(answer(attacker.send(request)) == b"", "giant headers got an answer")


def nests_without_end(attacker: Attacker) -> None:
    for opening in (b"[", b'{"a":', b'[{"prompt":'):
        expect_refusal(attacker.ask(b'{"prompt":' + opening * 50_000), b"400")


def sends_odd_json(attacker: Attacker) -> None:
    for body in (
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": 1e999}',
        b'{"prompt":"a","n":1' + b"0" * 5000,
        b"",
    ):
        expect_refusal(attacker.ask(body), b"400")


def speaks_something_else(attacker: Attacker) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00" * 500,
    ):
        begin = answer(attacker.send(data))[:12]
        expect(begin in (b"", b"HTTP/1.1 400"), f"{data[:20]!r} got {begin!r}")


def smuggles(attacker: Attacker) -> None:
    both = attacker.head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET
    expect(answer(attacker.send(both)).startswith(b"HTTP/1.1 400"), "two ways of saying a length were taken")
    twice = attacker.head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345"
    expect(answer(attacker.send(twice)).startswith(b"HTTP/1.1 400"), "two lengths were taken")


def pipelines(attacker: Attacker) -> None:
    connection = attacker.send(GET * 300 + GET.replace(b"\r\n\r\n", CLOSE))
    expect(answer(connection).count(b'{"status":"ok"}') == 301, "a pipelined request was lost")


def resets_amid_its_body(attacker: Attacker) -> None:
    for at in range(20):
        reset(attacker.send(attacker.head + b"Content-Length: 1000\r\n\r\n" + b"x" * at))


def closes_its_half(attacker: Attacker) -> None:
    connection = attacker.send(attacker.head + b"Content-Length: 1000\r\n\r\n{")
    connection.shutdown(socket.SHUT_WR)
    expect(answer(connection) == b"", "half a request got an answer")


def holds_five_hundred_idle_connections(attacker: Attacker) -> None:
    for _ in range(500):
        attacker.connect()


ATTACKS: list[Attack] = [
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
