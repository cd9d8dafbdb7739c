"""A replica that answers as the test says, to the byte; and the router in a thread of this process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from quire.service.config import ServiceConfig
from quire.service.router.config import RouterConfig
from quire.service.router.server import RouterServer
from tests.server_thread import ServerThread

Answer = Callable[["Exchange"], object]


@dataclass
class Exchange:
    """One request as it came, and what may be done with it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    handler: BaseHTTPRequestHandler
    gone: threading.Event = field(default_factory=threading.Event)

    def head(self, status: int = 200, **headers: str) -> None:
        self.handler.send_response_only(status)
        for name, value in headers.items():
            self.handler.send_header(name.replace("_", "-"), value)
        self.handler.end_headers()

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.head(status, content_type="application/json", content_length=str(len(body)), **headers)
        self.handler.wfile.write(body)

    def begin_stream(self, **headers: str) -> None:
        kind = "text/event-stream; charset=utf-8"
        self.head(content_type=kind, transfer_encoding="chunked", **headers)

    def chunk(self, data: bytes) -> None:
        """Of no bytes: the end."""
        self.handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.handler.wfile.flush()

    def cut(self) -> None:
        """The connection, in the middle of whatever was being said."""
        self.handler.close_connection = True
        self.handler.connection.shutdown(socket.SHUT_RDWR)

    def wait_until_gone(self) -> None:
        """For the other side to close."""
        while self.handler.rfile.read(1):
            pass
        self.gone.set()


class StubReplica:
    """Ready from the start. What it was asked is in `exchanges`, but for /health and /ready."""

    def __init__(self, answer: Answer) -> None:
        stub = self
        self.answer = answer
        self.ready_status = 200
        self.exchanges: list[Exchange] = []
        self._connections: list[socket.socket] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                stub._connections.append(self.connection)

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                exchange = Exchange(self.command, self.path, dict(self.headers.items()), body, self)
                if self.path in ("/health", "/ready"):
                    exchange.reply(stub.ready_status, b"{}")
                    return
                stub.exchanges.append(exchange)
                stub.answer(exchange)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.name = f"127.0.0.1:{self.server.server_address[1]}"
        self.url = f"http://{self.name}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """It refuses connections from now on, and ends those that there are."""
        self.server.shutdown()
        self.server.server_close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Addressed(Protocol):
    """A replica of whatever kind."""

    url: str


class LiveRouter(ServerThread):
    """In front of given replicas; or of those behind a name, which must be these."""

    server: RouterServer

    def __init__(
        self, replicas: Sequence[Addressed], *, replica_dns: str | None = None, **config: Any
    ) -> None:
        service = ServiceConfig(served_model_names=("tiny",), port=0, keep_alive=86400.0, **config)
        urls = () if replica_dns else tuple(replica.url for replica in replicas)
        router = RouterConfig(model="tiny", replicas=urls, replica_dns=replica_dns, probe_seconds=0.05)
        server = RouterServer(service, router)
        super().__init__(
            server, lambda: sum(replica.up for replica in server.state.replicas) == len(replicas)
        )

    def prefer(self, replica: Addressed) -> None:
        """Requests go there first: all others are said to be busy."""

        def busy() -> None:
            for other in self.server.state.replicas:
                other.in_flight = 0 if other.url == replica.url else 100

        self.call(busy)
