"""What the router holds and does for requests, whatever they are: bounded."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from quire.engine.registry.redis import Load
from quire.service.config import ServiceConfig
from quire.service.router import stream_affinity
from quire.service.router.directory import Registered
from quire.service.router.placement import NOWHERE, Location
from quire.service.router.replica import Replica
from quire.service.router.sessions import UsedConnection, kept_alive_socket, open_session
from quire.service.router.state import RouterState
from quire.service.router.stream_affinity import StreamAffinity
from tests.cluster.stub_replica import Exchange, LiveRouter, StubReplica
from tests.cluster.test_watch import OURS

CHAT = "/v1/chat/completions"
SECONDS = 30


def say(exchange: Exchange) -> None:
    exchange.reply(200, b"{}")


Make = Callable[..., tuple[LiveRouter, StubReplica]]


@pytest.fixture
def make() -> Iterator[Make]:
    ends: list[Callable[[], object]] = []

    def build(answer: Callable[[Exchange], object], **config: Any) -> tuple[LiveRouter, StubReplica]:
        replica = StubReplica(answer)
        router = LiveRouter([replica], **config)
        ends.extend((router.end, replica.close))
        return router, replica

    yield build
    for end in ends:
        end()


def post(router: LiveRouter, size: int, **headers: str) -> httpx.Response:
    return httpx.post(f"{router.url}{CHAT}", json={"a": "b" * size}, headers=headers, timeout=SECONDS)


def hold(router: LiveRouter, limit: int) -> None:
    router.server.state.held.limit = limit


def test_bodies_in_flight_are_bounded_together(make: Make) -> None:
    """Until they are answered: each may have to be sent again."""
    more = threading.Event()

    def slowly(exchange: Exchange) -> None:
        assert more.wait(SECONDS)
        say(exchange)

    router, replica = make(slowly)
    hold(router, 30_000)
    held = router.server.state.held
    first = threading.Thread(target=post, args=(router, 20_000))
    first.start()
    router.wait(lambda: len(replica.exchanges) == 1)
    assert held.size > 20_000
    refused = post(router, 20_000)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "router_full")
    assert refused.headers["retry-after"] == "1"
    more.set()
    assert post(router, 100).status_code == 200
    first.join(SECONDS)
    router.wait(lambda: held.size == 0)
    assert post(router, 20_000).status_code == 200


def test_answers_that_are_not_whole_are_bounded_too(make: Make) -> None:
    router, _ = make(lambda exchange: exchange.reply(200, b"x" * 50_000))
    hold(router, 30_000)
    refused = post(router, 10)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "router_full")
    router.wait(lambda: router.server.state.held.size == 0)
    hold(router, 60_000)
    assert len(post(router, 10).content) == 50_000


def test_a_stream_that_runs_holds_no_body(make: Make) -> None:
    more = threading.Event()

    def stream(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange.chunk(b"data: a\n\n")
        assert more.wait(SECONDS)
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.chunk(b"")

    router, _ = make(stream)
    body = {"a": "b" * 20_000}
    with httpx.stream("POST", f"{router.url}{CHAT}", json=body, timeout=SECONDS) as answer:
        chunks = answer.iter_raw()
        next(chunks)
        router.wait(lambda: router.server.state.held.size == 0)
        more.set()
        assert b"".join(chunks) == b"data: [DONE]\n\n"


KEYS = {"authorization": "Bearer key"}


def test_only_started_streams_with_ids_as_replicas_take_them_are_remembered(make: Make) -> None:
    router, replica = make(say, api_keys=("key",))
    known = router.server.state.stream_affinity
    for path in ("/openapi.json", "/", "/startup"):  # which need no key
        assert httpx.get(f"{router.url}{path}", headers={"x-stream-id": "s"}).status_code == 200
    assert post(router, 1, **{"x-stream-id": "s"}).status_code == 401
    for stream_id in ("x" * 65, "a b", "", "s\u00e4"):
        headers = [(b"authorization", b"Bearer key"), (b"x-stream-id", stream_id.encode())]
        assert httpx.post(f"{router.url}{CHAT}", json={}, headers=headers).status_code == 200
    assert httpx.get(f"{router.url}/v1/models", headers={**KEYS, "x-stream-id": "s"}).status_code == 200
    assert len(known) == 0
    assert replica.exchanges  # which say what is wrong with it
    assert post(router, 1, **KEYS, **{"x-stream-id": "s"}).status_code == 200
    assert len(known) == 1


def test_a_tenants_streams_push_out_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_affinity, "MAX_STREAMS", 100)
    known, replica = StreamAffinity(), Replica("http://r:80", up=True)
    known.settle(("alice", "s"), replica)
    known.settle(("bob", "kept"), replica)
    for number in range(1000):
        known.settle(("bob", f"s{number}"), replica)
        assert known.find(("bob", "kept"), [replica]) is replica  # it is asked for
    assert len(known) == 101
    assert known.find(("alice", "s"), [replica]) is replica
    assert known.find(("bob", "s0"), [replica]) is None


@pytest.mark.parametrize("status", [400, 404, 413, 429, 500, 503])
def test_a_refused_prompt_takes_no_others_with_it(
    make: Make, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = [bytes([number]) * 16 for number in range(4)]
    own = [bytes([number]) * 16 for number in range(4, 9)]
    prompts = iter([shared, shared + own])
    statuses = iter([200, *[status] * 3])
    router, _ = make(lambda exchange: exchange.reply(next(statuses), b"{}"))
    (replica,) = router.server.state.replicas

    async def locate(_: object) -> Location:
        digests = next(prompts)
        return Location(16 * len(digests), {"f": digests}, {"f": 16}, None)

    def register() -> None:
        monkeypatch.setattr(router.server.state, "locate", locate)
        replica.fingerprint = "f"

    router.call(register)
    assert [post(router, 1).status_code for _ in range(2)] == [200, status]
    now = time.monotonic()
    assert replica.sent_prefixes.match(shared + own, now) == 4
    assert replica.sent_prefixes.size(now) == 4


@pytest.mark.parametrize("path", ["/startup", "/docs", "/"])
def test_nobody_without_a_key_has_a_body_held(make: Make, path: str) -> None:
    """What needs no key is answered before a body has come, and goes to a replica without one."""
    router, replica = make(say, api_keys=("key",))
    for method, status in (("POST", 405), ("DELETE", 405), ("GET", 200)):
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 99\r\n"
        )
        with socket.create_connection(("127.0.0.1", router.port), SECONDS) as client:
            client.sendall(head.encode() + b"\r\n{")
            answer = client.recv(1 << 16)
        assert int(answer.split()[1]) == status
        assert (b"allow: GET, HEAD\r\n" in answer) == (status == 405)
    (got,) = replica.exchanges
    assert (got.method, got.path, got.body) == ("GET", path, b"")


@pytest.mark.parametrize("target", ["OPTIONS *", "GET *"])
def test_a_target_that_is_no_path_is_not_there(make: Make, target: str) -> None:
    router, replica = make(say, api_keys=("key",))
    for header, status in (("authorization: Bearer key", 404), ("x: y", 401)):
        with socket.create_connection(("127.0.0.1", router.port), SECONDS) as client:
            client.sendall(f"{target} HTTP/1.1\r\nhost: a\r\n{header}\r\nconnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert int(head.split()[1]) == status
        assert json.loads(body)["error"]["message"]
    assert not replica.exchanges


def test_of_replicas_that_are_down_a_few_are_asked_for_a_stream() -> None:
    """Of those that are up all are; whoever asks is told that it may be at one of the others."""
    replicas = [StubReplica(lambda exchange: exchange.reply(404, b"{}")) for _ in range(7)]
    router = LiveRouter(replicas)
    for replica in replicas[2:]:
        replica.close()
    router.wait(lambda: sum(not replica.up for replica in router.server.state.replicas) == 5)
    answer = httpx.get(f"{router.url}/v1/streams/any", timeout=SECONDS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    assert [len(replica.exchanges) for replica in replicas[:2]] == [1, 1]
    assert router.server.state.metrics.retries == 4  # the other one that is up, and three that are not
    router.end()
    for replica in replicas[:2]:
        replica.close()


def test_a_machine_that_vanished_is_given_up_whatever_was_on_its_way_there() -> None:
    """Nobody asks after a connection while it waits for something to be acknowledged."""
    address = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))
    with kept_alive_socket(address) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000


def test_a_connection_that_was_used_before_is_known() -> None:
    """Only such a one may have been closed as idle while a request was on its way."""

    async def ask_twice(url: str) -> list[bool]:
        links = [UsedConnection(), UsedConnection()]
        async with open_session(SECONDS) as session:
            for link in links:
                async with session.get(url, trace_request_ctx=link) as answer:
                    await answer.read()
        return [link.reused for link in links]

    replica = StubReplica(say)
    assert asyncio.run(ask_twice(replica.url)) == [False, True]
    replica.close()


def test_somebody_is_asked_though_the_registry_says_that_all_drain() -> None:
    """It may lie; who does drain says so."""
    state = RouterState(ServiceConfig(served_model_names=("tiny",)), max_held_bytes=1)
    first, second, down = replicas = [Replica(f"http://r{number}:80", up=number < 2) for number in range(3)]
    first.draining = second.draining = True
    state.fleet = replicas  # type: ignore[assignment]
    state.check_ready()
    asked: list[Replica] = []
    while state.has_others(set(asked)):
        asked.append(asyncio.run(state.place(NOWHERE, set(asked))).replica)
    assert {*asked[:2]} == {first, second}
    assert asked[2:] == [down]
    down.draining = True
    assert not state.has_others({first, second})
    assert asyncio.run(state.place(NOWHERE, {first, second})).replica in (first, second)
    state.fleet = [down]  # type: ignore[assignment]
    assert asyncio.run(state.place(NOWHERE, set())).replica is down


def test_a_replica_that_is_ready_does_not_drain_whatever_the_registry_says(make: Make) -> None:
    router, replica = make(say)
    said = [Registered(replica.url, "1", 1, "vector", OURS, Load(draining=True))]
    fleet = router.server.state.fleet
    assert fleet is not None
    (known,) = fleet
    router.call(lambda: fleet.register(OURS.fingerprint, said))
    router.wait(lambda: known.condition == "ready")
    router.call(lambda: fleet.register(OURS.fingerprint, said))  # it was seen before it was ready
    assert known.condition == "ready"
