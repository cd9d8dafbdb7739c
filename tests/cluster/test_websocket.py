"""WebSockets through the router: both ways, to the end that either side makes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http import HTTPStatus

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.server import ServerConnection

from tests.cluster.stub_replica import Exchange, LiveRouter, StubReplica
from tests.cluster.websocket_replica import (
    CREATED,
    Make,
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
    reason = "\N{SNOWMAN}" * 41  # as long as one may be
    router = make(WebSocketReplica(lambda connection: connection.close(4001, reason)))
    with open_socket(router) as client:
        assert ending(client) == (4001, reason)


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


BUSY = {"error": {"message": "16 wait", "type": "rate_limit_error", "param": "n", "code": "queue_full"}}


@pytest.mark.parametrize(
    ("status", "told", "code"),
    [(429, 429, "queue_full"), (503, 503, "queue_full"), (403, 403, "queue_full")]
    + [(odd, 502, "websocket_refused") for odd in (200, 204, 302, 999)],
)
def test_a_refusal_is_told_in_the_replicas_words(status: int, told: int, code: str) -> None:
    """By each replica once; what is no refusal is a fault of the replica, and leads nowhere else."""

    def refuse(exchange: Exchange) -> None:
        if status == 204:
            exchange.head(204)
        else:
            exchange.reply(status, json.dumps(BUSY).encode(), retry_after="7", location="/elsewhere")

    replicas = [StubReplica(refuse) for _ in range(2)]
    router = LiveRouter(replicas)
    with pytest.raises(InvalidStatus) as refused:
        open_socket(router)
    response = refused.value.response
    error = json.loads(response.body or b"")["error"]
    assert (response.status_code, error["code"]) == (told, code)
    if told == status:
        assert (error["message"], error["param"], response.headers["retry-after"]) == ("16 wait", "n", "7")
    attempts = [len(replica.exchanges) for replica in replicas]
    assert sorted(attempts) == ([0, 1] if status == 403 else [1, 1])
    assert {exchange.path for replica in replicas for exchange in replica.exchanges} == {
        "/v1/responses?a=%2F"
    }
    router.end()
    for replica in replicas:
        replica.close()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_handshake_goes_nowhere_else(make: Make, status: int) -> None:
    """A replica that redirects would have the router send the client's key wherever it says."""
    stranger = StubReplica(lambda exchange: exchange.reply(200, b"{}"))
    router = make(
        StubReplica(lambda exchange: exchange.head(status, location=stranger.url, content_length="0"))
    )
    with pytest.raises(InvalidStatus) as refused:
        open_socket(router, additional_headers={"x-api-key": "k"})
    assert refused.value.response.status_code == 502
    assert not stranger.exchanges
    stranger.close()


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

    def talk(connection: ServerConnection) -> None:
        for message in connection:
            cancels = "cancel" in message
            connection.send(
                json.dumps({"type": "response.cancelled", "response_id": "r"} if cancels else CREATED)
            )

    router = make(WebSocketReplica(talk), shutdown_timeout=0.2)
    with open_socket(router) as idle, open_socket(router) as busy:
        for client in (idle, busy):
            client.send(json.dumps({"type": "response.create"}))
            assert json.loads(client.recv(timeout=30)) == CREATED
        idle.send(json.dumps({"type": "response.cancel", "response_id": "r"}))
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
