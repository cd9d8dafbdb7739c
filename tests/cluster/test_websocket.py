"""WebSockets through the router: both ways, to the end that either side makes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response
from websockets.sync.client import ClientConnection, connect
from websockets.sync.server import ServerConnection, serve
from websockets.typing import Subprotocol

from quire.service.router import websocket
from quire.service.router.placement import Placement
from quire.service.router.replica import SILENT_PROBES
from tests.cluster.stub_replica import LiveRouter

Talk = Callable[[ServerConnection], object]


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


Make = Callable[..., LiveRouter]


@pytest.fixture
def make() -> Iterator[Make]:
    """A router in front of these, of which it asks the first one first."""
    routers: list[LiveRouter] = []
    replicas: list[WebSocketReplica] = []

    def build(*made: WebSocketReplica, **config: Any) -> LiveRouter:
        replicas.extend(made)
        routers.append(LiveRouter(list(made), **config))
        routers[-1].prefer(made[0])
        return routers[-1]

    yield build
    for router in routers:
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


def test_messages_pass_both_ways(make: Make) -> None:
    replica = WebSocketReplica(echo)
    router = make(replica)
    headers = {"Authorization": "Bearer k", "X-Request-Id": "mine"}
    with open_socket(router, additional_headers=headers, subprotocols=["a", "b"]) as client:
        for message in ("text \N{SNOWMAN}", b"\x00\xff", "", "x" * 100_000):
            client.send(message)
            assert client.recv(timeout=30) == message
        assert client.subprotocol == "b"
        assert client.response is not None
        assert client.response.headers["x-request-id"] == "mine"
        assert "reason=load" in client.response.headers["x-quire-route"]
    (request,) = replica.requests
    assert request.path == "/v1/responses?a=%2F"
    assert request.headers["authorization"] == "Bearer k"
    assert request.headers["x-request-id"] == "mine"


def test_the_replicas_end_is_the_clients(make: Make) -> None:
    router = make(WebSocketReplica(lambda connection: connection.close(4001)))
    with open_socket(router) as client:
        assert ending(client)[0] == 4001


def test_the_clients_end_is_the_replicas(make: Make) -> None:
    ended = threading.Event()

    def listen(connection: ServerConnection) -> None:
        echo(connection)
        ended.set()

    router = make(WebSocketReplica(listen))
    with open_socket(router):
        pass
    assert ended.wait(30)
    router.wait(lambda: not router.server.state.generations)
    assert all(replica.in_flight == 0 for replica in router.server.state.replicas)


def test_a_lost_replica_is_told_of_and_the_socket_closed(make: Make) -> None:
    def vanish(connection: ServerConnection) -> None:
        connection.recv()
        connection.socket.shutdown(socket.SHUT_RDWR)

    router = make(WebSocketReplica(vanish))
    with open_socket(router) as client:
        client.send("hello")
        event = json.loads(client.recv(timeout=30))
        assert (event["type"], event["error"]["code"]) == ("error", "replica_lost")
        assert ending(client)[0] == 1011


CREATED = {"type": "response.created", "sequence_number": 0, "response_id": "r", "response": {"id": "r"}}
DEAD = {"message": "the engine died", "type": "server_error", "param": None, "code": "engine_dead"}


def leave(connection: ServerConnection) -> None:
    connection.socket.shutdown(socket.SHUT_RDWR)


def die(connection: ServerConnection) -> None:
    """As an API process does whose engine has died."""
    connection.send(json.dumps({"type": "response.failed", "response_id": "r", "response": {"error": DEAD}}))
    connection.send(json.dumps({"type": "error", "stream_id": "b", "error": DEAD}))
    connection.close(1001)


@pytest.mark.parametrize(
    ("end", "code"),
    [(leave, 1011), (die, 1011), (lambda connection: connection.close(1012), 1012)],
    ids=["leaves", "dies", "closes"],
)
def test_each_response_of_a_lost_replica_hears_of_it(make: Make, end: Talk, code: int) -> None:
    """Those that have begun, and those that have not, of which one was refused."""

    def talk(connection: ServerConnection) -> None:
        for _ in range(3):
            connection.recv()
        connection.send(json.dumps({**CREATED, "stream_id": "a"}))
        connection.send(json.dumps({"type": "error", "error": {"code": "unknown_field"}}))  # says not whose
        end(connection)

    router = make(WebSocketReplica(talk))
    with open_socket(router) as client:
        for fields in ({"stream_id": "a"}, {}, {"stream_id": "b"}):
            client.send(json.dumps({"type": "response.create", **fields}))
        created, refused, failed, unbegun = (json.loads(client.recv(timeout=30)) for _ in range(4))
        assert (created["type"], refused["error"]["code"]) == ("response.created", "unknown_field")
        assert (failed["type"], failed["response_id"]) == ("response.failed", "r")
        assert failed["response"]["error"]["code"] == "replica_lost"
        assert (unbegun["type"], unbegun["stream_id"]) == ("error", "b")
        assert unbegun["error"]["code"] == "replica_lost"
        assert ending(client)[0] == code


def test_a_replica_that_stands_still_is_lost(make: Make) -> None:
    over = threading.Event()

    def stand_still(connection: ServerConnection) -> None:
        connection.send(json.dumps(CREATED))
        assert over.wait(30)

    router = make(WebSocketReplica(stand_still))
    with open_socket(router) as client:
        assert json.loads(client.recv(timeout=30)) == CREATED
        (known,) = router.server.state.replicas
        router.call(lambda: [known.note_probe(answered=False) for _ in range(SILENT_PROBES)])
        failed = json.loads(client.recv(timeout=30))
        assert failed["response"]["error"]["code"] == "replica_lost"
        assert json.loads(client.recv(timeout=30))["error"]["code"] == "replica_lost"
        assert ending(client)[0] == 1011
    over.set()
    router.wait(lambda: known.in_flight == 0)


def test_a_replica_that_takes_no_more_may_have_said_its_last(make: Make) -> None:
    """What it said before it left is the client's, though nothing can be sent there any more."""
    said = threading.Event()

    def talk(connection: ServerConnection) -> None:
        connection.recv()
        connection.send(json.dumps(CREATED))
        connection.send(json.dumps({"type": "response.completed", "response_id": "r"}))
        connection.close(1001)
        said.set()

    router = make(WebSocketReplica(talk))
    with open_socket(router) as client:
        client.send("now")
        assert said.wait(30)
        for _ in range(9):
            client.send("more")
        assert [json.loads(client.recv(timeout=30))["type"] for _ in range(2)] == [
            "response.created",
            "response.completed",
        ]
        assert ending(client)[0] == 1001


def test_a_replica_that_answers_no_handshake_is_left(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that stands still; who waits there would wait for ever."""
    over = threading.Event()
    silent, other = WebSocketReplica(echo, until=over), WebSocketReplica(echo)
    router = make(silent, other)

    def note(placement: Placement, attempt: int) -> None:
        monkeypatch.setattr(websocket, "HANDSHAKE_SECONDS", 0.1 if attempt == 1 else 30.0)

    monkeypatch.setattr(router.server.state.metrics, "placed", note)
    with open_socket(router) as client:
        client.send("a")
        assert client.recv(timeout=30) == "a"
        assert client.response is not None
        assert client.response.headers["x-quire-route"].endswith("attempt=2")
    over.set()


def test_a_handshake_ends_with_its_router(make: Make) -> None:
    over = threading.Event()
    replica = WebSocketReplica(echo, until=over)
    router = make(replica)

    def stop() -> None:
        router.wait(lambda: bool(replica.requests))
        router.server.stop_soon()

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(InvalidStatus) as refused:
        open_socket(router)
    over.set()
    assert refused.value.response.status_code == 503
    assert b"shutting down" in (refused.value.response.body or b"")
    stopper.join()
    router.thread.join(20)
    assert router.end() == 0


def test_another_replica_takes_what_a_busy_one_refuses(make: Make) -> None:
    busy, free = WebSocketReplica(echo, HTTPStatus.SERVICE_UNAVAILABLE), WebSocketReplica(echo)
    router = make(busy, free)
    with open_socket(router) as client:
        client.send("a")
        assert client.recv(timeout=30) == "a"
    assert len(busy.requests) == len(free.requests) == 1


@pytest.mark.parametrize("refusal", [HTTPStatus.FORBIDDEN, HTTPStatus.SERVICE_UNAVAILABLE])
def test_a_refusal_is_the_handshakes_answer(make: Make, refusal: HTTPStatus) -> None:
    router = make(WebSocketReplica(echo, refusal))
    with pytest.raises(InvalidStatus) as refused:
        open_socket(router)
    assert refused.value.response.status_code == refusal
    assert b'"error"' in (refused.value.response.body or b"")


def test_a_socket_needs_the_key(make: Make) -> None:
    replica = WebSocketReplica(echo)
    router = make(replica, api_keys=("key",))
    with pytest.raises(InvalidStatus) as refused:
        open_socket(router)
    assert refused.value.response.status_code == 401
    assert not replica.requests
    with open_socket(router, additional_headers={"Authorization": "Bearer key"}) as client:
        client.send("a")
        assert client.recv(timeout=30) == "a"


def test_a_router_that_ends_says_so(make: Make) -> None:
    """At once to who has nothing to wait for; to the others in the end."""
    router = make(WebSocketReplica(echo), shutdown_timeout=0.2)
    created = {"type": "response.created", "sequence_number": 0, "response_id": "r", "response": {"id": "r"}}
    with open_socket(router) as idle, open_socket(router) as busy:
        for client in (idle, busy):
            client.send(json.dumps(created))
            assert json.loads(client.recv(timeout=30)) == created
        idle.send(json.dumps({"type": "response.failed", "response_id": "r"}))
        assert idle.recv(timeout=30)
        router.server.stop_soon()
        assert ending(idle)[0] == 1001
        end = json.loads(busy.recv(timeout=30))
        assert (end["type"], end["response_id"]) == ("response.failed", "r")
        assert ending(busy)[0] == 1001
    router.thread.join(20)
    assert router.end() == 0


def test_a_router_that_ends_waits_for_responses_that_have_not_begun(make: Make) -> None:
    more = threading.Event()

    def talk(connection: ServerConnection) -> None:
        connection.recv()
        connection.send("heard")
        assert more.wait(30)
        connection.send(json.dumps({**CREATED, "stream_id": "a"}))
        connection.send(json.dumps({"type": "response.completed", "response_id": "r"}))
        connection.recv()

    router = make(WebSocketReplica(talk))
    create = json.dumps({"type": "response.create", "stream_id": "a"})
    with open_socket(router) as client:
        client.send(create)
        assert client.recv(timeout=30) == "heard"
        router.server.stop_soon()
        router.wait(lambda: router.server.state.draining)
        client.send(create)
        refused = json.loads(client.recv(timeout=30))
        assert (refused["stream_id"], refused["error"]["code"]) == ("a", "not_ready")
        more.set()
        ends = [json.loads(client.recv(timeout=30))["type"] for _ in range(2)]
        assert ends == ["response.created", "response.completed"]
        assert ending(client)[0] == 1001
    router.thread.join(20)
    assert router.end() == 0


def test_a_key_may_come_as_a_subprotocol(make: Make) -> None:
    """To the router, and by it to the replica, which says what is spoken."""
    replica = WebSocketReplica(echo)
    router = make(replica, api_keys=("key",))
    offered = ["openai-insecure-api-key.key", "b"]
    with open_socket(router, subprotocols=offered) as client:
        client.send("a")
        assert client.recv(timeout=30) == "a"
        assert client.subprotocol == "b"
    (request,) = replica.requests
    assert request.headers["sec-websocket-protocol"].replace(" ", "").split(",") == offered
    with pytest.raises(InvalidStatus) as refused:
        open_socket(router, subprotocols=["openai-insecure-api-key.wrong", "b"])
    assert refused.value.response.status_code == 401


def lose_engine(connection: ServerConnection) -> None:
    connection.send(json.dumps({"tag": "a", "error": DEAD}))


@pytest.mark.parametrize("end", [leave, lose_engine])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_lost_replicas_answers_end_with_an_error_each(make: Make, path: str, end: Talk) -> None:
    def vanish(connection: ServerConnection) -> None:
        for message in connection:
            if message == "now":
                end(connection)
            elif "cancel" not in message:
                tag = json.loads(message).get("tag")
                named = {} if tag is None else {"tag": tag}
                connection.send(json.dumps({**named, "choices": []}))
                if tag == "b":
                    connection.send(json.dumps({**named, "done": True}))

    router = make(WebSocketReplica(vanish))
    with open_socket(router, path) as client:
        for frame in ({"tag": "a"}, {"tag": "b"}, {}, {"tag": None}, {"cancel": "a"}):
            client.send(json.dumps(frame))
        for tag in ("a", "b", "b", None, None):
            assert json.loads(client.recv(timeout=30)).get("tag") == tag
        client.send("now")  # it asks for something, too, as far as the router can tell
        ends = [json.loads(client.recv(timeout=30)) for _ in range(4)]
        assert [end.get("tag") for end in ends] == ["a", None, None, None]
        assert {end["error"]["code"] for end in ends} == {"replica_lost"}
        assert ending(client)[0] == 1011


def test_a_router_that_ends_waits_for_answers(make: Make) -> None:
    """An error that is no answer's does not count as one's end."""
    router = make(WebSocketReplica(echo))
    path = "/v1/completions"
    with open_socket(router, path) as idle, open_socket(router, path) as busy:
        asked = json.dumps({"tag": "a"})
        for client in (idle, busy):
            client.send(asked)
            assert client.recv(timeout=30) == asked
        for frame in ({"tag": "a", "done": True}, {"cancel": "x"}):  # as the replica says, who repeats it
            idle.send(json.dumps(frame))
            assert idle.recv(timeout=30)
        in_use = {"error": {"code": "tag_in_use", "param": "tag"}, "cancel": "x"}
        busy.send(json.dumps(in_use))
        assert json.loads(busy.recv(timeout=30)) == in_use
        router.server.stop_soon()
        assert ending(idle)[0] == 1001
        busy.send(json.dumps({"tag": "b"}))
        refused = json.loads(busy.recv(timeout=30))
        assert (refused["tag"], refused["error"]["code"]) == ("b", "not_ready")
        busy.send(json.dumps({"tag": "a", "done": True, "cancel": "x"}))
        assert json.loads(busy.recv(timeout=30))["done"]
        assert ending(busy)[0] == 1001
    router.thread.join(20)
    assert router.end() == 0


def test_a_router_out_of_patience_ends_each_answer(make: Make) -> None:
    router = make(WebSocketReplica(echo), shutdown_timeout=0.2)
    with open_socket(router, "/v1/completions") as client:
        for frame in ({"tag": "a"}, {}):
            client.send(json.dumps(frame))
            assert client.recv(timeout=30)
        router.server.stop_soon()
        ends = [json.loads(client.recv(timeout=30)) for _ in range(2)]
        assert [(end.get("tag"), end["error"]["code"]) for end in ends] == [
            ("a", "not_ready"),
            (None, "not_ready"),
        ]
        assert ending(client)[0] == 1001
    router.thread.join(20)
    assert router.end() == 0
