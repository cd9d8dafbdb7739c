"""A replica whose WebSockets talk as the test says, and a router in front of some of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.client import ClientConnection, connect
from websockets.sync.server import ServerConnection, serve
from websockets.typing import Subprotocol

from tests.cluster.stub_replica import LiveRouter

Talk = Callable[[ServerConnection], object]
Make = Callable[..., LiveRouter]

CREATED = {"type": "response.created", "sequence_number": 0, "response_id": "r", "response": {"id": "r"}}


class WebSocketReplica:
    """Ready from the start; talks as the test says."""

    def __init__(
        self, talk: Talk, refusal: HTTPStatus | None = None, until: threading.Event | None = None
    ) -> None:
        """`until`: when it answers handshakes."""
        self.requests: list[Request] = []

        def answer(connection: ServerConnection, request: Request) -> Response | None:
            if request.path in ("/health", "/ready"):
                return connection.respond(HTTPStatus.OK, "{}")
            self.requests.append(request)
            if until is not None:
                assert until.wait(30)
            return None if refusal is None else connection.respond(refusal, "no")

        def choose(connection: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
            return Subprotocol("b") if "b" in offered else None

        self.server = serve(talk, "127.0.0.1", 0, process_request=answer, select_subprotocol=choose)
        self.url = f"http://127.0.0.1:{self.server.socket.getsockname()[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@contextlib.contextmanager
def routers() -> Iterator[Make]:
    """Makes routers in front of replicas, of which each asks the first one first."""
    started: list[LiveRouter] = []
    replicas: list[WebSocketReplica] = []

    def build(*made: WebSocketReplica, **config: Any) -> LiveRouter:
        replicas.extend(made)
        started.append(LiveRouter(list(made), **config))
        started[-1].prefer(made[0])
        return started[-1]

    yield build
    for router in started:
        router.end()
    for replica in replicas:
        replica.server.shutdown()


def open_socket(router: LiveRouter, path: str = "/v1/responses?a=%2F", **options: Any) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{router.port}{path}", open_timeout=30, **options)


def echo(connection: ServerConnection) -> None:
    for message in connection:
        connection.send(message)


def ending(client: ClientConnection) -> tuple[int, str]:
    """Code and reason, once the other side has closed."""
    with pytest.raises(ConnectionClosed):
        client.recv(timeout=30)
    assert client.close_code is not None
    return client.close_code, client.close_reason or ""
