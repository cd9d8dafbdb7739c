"""WebSockets of replicas that are lost, or cannot be had: every answer on them hears of it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import ClientConnectionResetError, WSMessage, WSMsgType
from starlette.requests import HTTPConnection
from websockets.exceptions import InvalidStatus
from websockets.sync.server import ServerConnection

from quire.service.config import ServiceConfig
from quire.service.router import failures, handshake
from quire.service.router.handshake import Handshake, Link
from quire.service.router.line import Line
from quire.service.router.placement import Placement
from quire.service.router.replica import SILENT_PROBES, Replica
from quire.service.router.state import RouterState
from quire.service.router.websocket import Passage
from tests.cluster.stub_replica import Exchange, LiveRouter, StubReplica
from tests.cluster.websocket_replica import (
    CREATED,
    Make,
    Talk,
    WebSocketReplica,
    echo,
    ending,
    open_socket,
    routers,
)


@pytest.fixture
def make() -> Iterator[Make]:
    with routers() as build:
        yield build


def test_a_lost_replica_is_told_of_and_the_socket_closed(make: Make) -> None:
    def vanish(connection: ServerConnection) -> None:
        connection.recv()
        connection.socket.shutdown(socket.SHUT_RDWR)

    router = make(WebSocketReplica(vanish))
    with open_socket(router) as client:
        client.send("hello")
        for _ in ("hello", "what may have been said and was not read"):
            event = json.loads(client.recv(timeout=30))
            assert (event["type"], event["error"]["code"]) == ("error", "replica_lost")
        assert ending(client)[0] == 1011


DEAD = {"message": "the engine died", "type": "server_error", "param": None, "code": "engine_dead"}
FAILURE = {"code": "server_error", "message": "the engine died", "cause": "engine_dead"}


def leave(connection: ServerConnection) -> None:
    connection.socket.shutdown(socket.SHUT_RDWR)


def die(connection: ServerConnection) -> None:
    """As an API process does whose engine has died."""
    connection.send(
        json.dumps({"type": "response.failed", "response_id": "r", "response": {"error": FAILURE}})
    )
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
        rest = json.loads(client.recv(timeout=30))  # for what it may have said and was not read
        assert (rest["error"]["code"], "stream_id" in rest) == ("replica_lost", False)
        assert ending(client)[0] == code


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/completions"])
def test_failures_on_sockets_count_until_an_answer_ends_as_it_should(
    make: Make, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "HALF_LIFE_SECONDS", 1e9)
    ends = {
        "/v1/responses": {"type": "response.completed", "response_id": "r"},
        "/v1/completions": {"done": True},
    }
    talks = iter([leave, lambda connection: connection.close(1012), None])

    def talk(connection: ServerConnection) -> None:
        connection.recv()
        end = next(talks)
        if end is None:
            connection.send(json.dumps({"error": {"code": "unknown_field"}, "type": "error"}))
            connection.recv()
            connection.send(json.dumps(ends[path]))
            connection.recv()
        else:
            end(connection)

    router = make(WebSocketReplica(talk))
    (known,) = router.server.state.replicas
    for load in (8, 24):
        router.wait(lambda: known.up)
        with open_socket(router, path) as client:
            client.send("{}")
            assert "replica_lost" in str(client.recv(timeout=30))
        assert known.failures.load(time.monotonic()) == load
    router.wait(lambda: known.up)
    with open_socket(router, path) as client:
        client.send("{}")
        assert "unknown_field" in str(client.recv(timeout=30))
        assert known.failures.load(time.monotonic()) == 24
        client.send("{}")
        assert json.loads(client.recv(timeout=30)) == ends[path]
        router.wait(lambda: known.failures.load(time.monotonic()) == 0)


FAULT = {"message": "m", "type": "server_error", "param": None, "code": "engine_error"}
FAILED = {"error": {"code": "server_error", "message": "m", "cause": "engine_error"}}


@pytest.mark.parametrize(
    ("path", "fault", "end"),
    [
        ("/v1/completions", {"error": FAULT}, {"done": True}),
        (
            "/v1/responses",
            {"type": "response.failed", "response_id": "r", "response": FAILED},
            {"type": "response.completed", "response_id": "r", "response": {"error": None}},
        ),
    ],
)
def test_answers_that_a_replica_fails_on_count_each(
    make: Make, path: str, fault: object, end: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although their socket stays, and is older than the failures."""
    monkeypatch.setattr(failures, "HALF_LIFE_SECONDS", 1e9)
    says = iter([fault, fault, end])

    def talk(connection: ServerConnection) -> None:
        for _ in connection:
            connection.send(json.dumps(next(says)))

    router = make(WebSocketReplica(talk))
    (known,) = router.server.state.replicas
    with open_socket(router, path) as client:
        for load in (8, 24, 0):
            client.send("{}")
            client.recv(timeout=30)
            router.wait(lambda load=load: known.failures.load(time.monotonic()) == load)


@pytest.mark.parametrize(
    ("answer", "status", "load"),
    [
        (lambda exchange: exchange.cut(), 503, 8),
        (lambda exchange: exchange.reply(500, b"{}"), 500, 8),
        (lambda exchange: exchange.reply(503, b"{}"), 503, 0),
        (lambda exchange: exchange.reply(403, b"{}"), 403, 0),
    ],
)
def test_handshakes_that_fail_count(
    answer: Callable[[Exchange], object], status: int, load: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "HALF_LIFE_SECONDS", 1e9)
    replica = StubReplica(answer)
    router = LiveRouter([replica])
    with pytest.raises(InvalidStatus) as refused:
        open_socket(router)
    assert refused.value.response.status_code == status
    (known,) = router.server.state.replicas
    assert known.failures.load(time.monotonic()) == load
    router.end()
    replica.close()


def test_a_message_that_is_too_large_ends_its_socket(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which holds it whole; what runs on the socket hears of it."""
    monkeypatch.setattr(handshake, "MAX_MESSAGE_BYTES", 1000)

    def swell(connection: ServerConnection) -> None:
        for size in map(int, connection):
            connection.send("a" * size)

    router = make(WebSocketReplica(swell))
    with open_socket(router, "/v1/completions") as client:
        client.send("999")
        assert client.recv(timeout=30) == "a" * 999
        client.send("1001")
        for _ in range(2):
            assert json.loads(client.recv(timeout=30))["error"]["code"] == "message_too_large"
        code, reason = ending(client)
        assert code == 1011 and "bytes" in reason
    assert router.server.state.metrics.failures["during"] == 1


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


class _Leaving:
    """A replica's end of a WebSocket: it takes no more, and there is still something of it to read."""

    close_code = 1001

    def __init__(self, *said: dict[str, object]) -> None:
        texts = [WSMessage(WSMsgType.TEXT, json.dumps(each), None) for each in said]
        self._left = iter([*texts, WSMessage(WSMsgType.CLOSE, 1001, None)])

    async def send_str(self, _: str) -> None:
        raise ClientConnectionResetError

    async def receive(self) -> WSMessage:
        await asyncio.sleep(0)
        return next(self._left)


@pytest.mark.anyio
async def test_a_replica_that_takes_no_more_may_have_said_its_last() -> None:
    """What it said before it left is the client's, though nothing can be sent there any more."""
    leaving: Any = _Leaving(CREATED, {"type": "response.completed", "response_id": "r"})
    link = Link(Placement.at_home(Replica("http://a", up=True)), 1, leaving, 0.0)
    sent: list[Any] = []
    asked = iter([{"type": "websocket.receive", "text": "more"}])

    async def receive() -> Any:
        return next(asked)

    async def send(message: Any) -> None:
        sent.append(message)

    state = RouterState(ServiceConfig(served_model_names=("tiny",)), max_held_bytes=1)
    scope = {"type": "websocket", "path": "/v1/responses", "state": {}}
    line = Line(Handshake(state, HTTPConnection(scope)), link)
    await Passage(state, scope, receive, send, line).run()
    *events, closed = sent
    assert [json.loads(event["text"])["type"] for event in events] == [
        "response.created",
        "response.completed",
    ]
    assert closed == {"type": "websocket.close", "code": 1001, "reason": ""}


def test_a_replica_that_answers_no_handshake_is_left(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that stands still; who waits there would wait for ever."""
    over = threading.Event()
    silent, other = WebSocketReplica(echo, until=over), WebSocketReplica(echo)
    router = make(silent, other)

    def note(placement: Placement, attempt: int) -> None:
        monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.1 if attempt == 1 else 30.0)

    monkeypatch.setattr(router.server.state.metrics, "placed", note)
    with open_socket(router) as client:
        client.send("a")
        assert client.recv(timeout=30) == "a"
        assert client.response is not None
        assert client.response.headers["x-quire-route"].endswith("attempt=2")
    over.set()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_response_that_may_be_where_nobody_answers_is_not_said_to_be_gone(is_known: bool) -> None:
    """As over HTTP; the socket stays, and the message may be sent again."""
    previous = f"resp_{'0' * 48}"
    here, home = WebSocketReplica(echo), StubReplica(lambda exchange: exchange.reply(404, b"{}"))
    router = LiveRouter([here, home])
    first, second = router.server.state.replicas
    if is_known:
        router.server.state.response_affinity.settle(("", previous), second)
    home.close()
    router.wait(lambda: not second.up)
    create = {"type": "response.create", "stream_id": "a"}
    with open_socket(router) as client:
        for _ in range(2):
            client.send(json.dumps({**create, "previous_response_id": previous}))
            told = json.loads(client.recv(timeout=30))
            assert (told["type"], told["status"], told["stream_id"]) == ("error", 503, "a")
            assert (told["error"]["code"], told["error"]["headers"]) == ("not_ready", {"retry-after": "2"})
        router.wait(lambda: not router.server.state.generations)
        client.send(json.dumps(create))
        assert json.loads(client.recv(timeout=30)) == create
    assert first.failures.load(time.monotonic()) == 0
    router.end()
    here.server.shutdown()


def test_a_socket_whose_last_message_is_refused_ends_with_its_router() -> None:
    over = threading.Event()

    def hesitate(exchange: Exchange) -> None:
        assert over.wait(30)
        exchange.reply(500, b"{}")

    here, home = WebSocketReplica(echo), StubReplica(hesitate)
    router = LiveRouter([here, home], shutdown_timeout=30)
    router.prefer(here)
    with open_socket(router) as client:
        client.send(json.dumps({"type": "response.create", "previous_response_id": f"resp_{'0' * 48}"}))
        router.wait(lambda: bool(home.exchanges))
        router.server.stop_soon()
        router.wait(lambda: router.server.state.draining)
        over.set()
        assert json.loads(client.recv(timeout=30))["error"]["code"] == "not_ready"
        assert ending(client)[0] == 1001
    router.thread.join(20)
    assert router.end() == 0
    here.server.shutdown()
    home.close()


HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def test_a_handshake_ends_with_its_client(make: Make) -> None:
    over = threading.Event()
    first, second = WebSocketReplica(echo, until=over), WebSocketReplica(echo, until=over)
    router = make(first, second)
    with socket.create_connection(("127.0.0.1", router.port), 30) as client:
        client.sendall(HANDSHAKE)
        router.wait(lambda: bool(first.requests))
    router.wait(lambda: not router.server.state.streams)
    over.set()
    assert not second.requests
    assert [replica.up for replica in router.server.state.replicas] == [True, True]


def test_what_is_said_before_the_handshakes_end_is_passed_on(make: Make) -> None:
    over = threading.Event()
    replica = WebSocketReplica(echo, until=over)
    router = make(replica)
    with socket.create_connection(("127.0.0.1", router.port), 30) as client:
        client.sendall(HANDSHAKE)
        router.wait(lambda: bool(replica.requests))
        client.sendall(b"\x81\x82\0\0\0\0hi")
        over.set()
        received = b""
        while not received.endswith(b"\x81\x02hi"):
            received += client.recv(4096)


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
