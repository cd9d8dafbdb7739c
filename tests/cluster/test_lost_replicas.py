"""Streams of replicas that are lost: each ends once, and says of what."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from quire.service.router import failures
from quire.service.router.config import RouterConfig
from quire.service.router.fleet import Fleet
from quire.service.router.replica import SILENT_PROBES, Replica
from tests.cluster.stub_replica import Exchange, LiveRouter, StubReplica

CHAT = "/v1/chat/completions"
Make = Callable[..., LiveRouter]


def say(exchange: Exchange) -> None:
    exchange.reply(200, b"{}")


@pytest.fixture
def make() -> Iterator[Make]:
    """A router in front of replicas that answer so, of which it asks the first one first."""
    ends: list[Callable[[], object]] = []

    def build(*answers: Callable[[Exchange], object], **config: Any) -> LiveRouter:
        replicas = [StubReplica(answer) for answer in answers]
        router = LiveRouter(replicas, **config)
        router.prefer(replicas[0])
        ends.extend((router.end, *(replica.close for replica in replicas)))
        return router

    yield build
    for end in ends:
        end()


def post(router: LiveRouter, path: str = CHAT) -> httpx.Response:
    return httpx.post(f"{router.url}{path}", json={"any": "thing"}, timeout=30)


def metric(router: LiveRouter, name: str) -> float:
    text = httpx.get(f"{router.url}/metrics").text
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


DEAD = b'"error":{"message":"the engine died","type":"server_error","param":null,"code":"engine_dead"}'


@pytest.mark.parametrize(
    ("path", "end"),
    [
        (CHAT, b"data: {%b}\n\n" % DEAD),
        (CHAT, b"id: 2\ndata: {%b}\n\n" % DEAD),
        (
            "/v1/responses",
            b'event: response.failed\ndata: {"type":"response.failed","response":{"status":"failed","error":'
            b'{"code":"server_error","message":"the engine died","cause":"engine_dead"}}}\n\n',
        ),
        (
            "/v1/messages",
            b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"the engine died",'
            b'"code":"engine_dead"}}\n\n',
        ),
    ],
)
def test_a_replica_whose_engine_died_is_lost(make: Make, path: str, end: bytes) -> None:
    """Its API process lives a moment longer, and says so: for clients of a router that is no other thing."""

    def die(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange.chunk(b"data: one\n\ndata: two\n\n" + end)
        exchange.chunk(b"")

    asked: list[str] = []

    def answer_well(exchange: Exchange) -> None:
        asked.append(exchange.path)
        say(exchange)

    router = make(die, answer_well)
    *events, last, rest = post(router, path).content.split(b"\n\n")
    assert (events, rest) == ([b"data: one", b"data: two"], b"")
    assert json.loads(last[last.index(b"{") :])["error"]["code"] == "replica_lost"
    assert not asked


LOST = "the replica was lost in the middle of its answer"


@pytest.mark.parametrize(
    ("path", "event", "name", "error"),
    [
        *(
            (path, "data: one\n\n", "", {"type": "server_error", "param": None, "code": "replica_lost"})
            for path in (CHAT, "/v1/completions", "/v1/responses")
        ),
        (
            "/v1/messages",
            "event: ping\ndata: {}\n\n",
            "event: error\n",
            {"type": "api_error", "code": "replica_lost"},
        ),
        ("/api/chat", '{"done":false}\n', None, None),
        ("/api/generate", '{"done":false}\n', None, None),
    ],
)
def test_a_lost_replicas_stream_ends_with_its_apis_error(
    make: Make, path: str, event: str, name: str | None, error: dict[str, str | None] | None
) -> None:
    """Once, and after what has come whole of it."""

    def cut(exchange: Exchange) -> None:
        kind = "text/event-stream" if error else "application/x-ndjson"
        exchange.head(content_type=kind, transfer_encoding="chunked")
        exchange.chunk(f"{event}{event[:4]}".encode())
        exchange.cut()

    first, last = post(make(cut), path).text.removesuffix("\n").split(event)
    assert first == ""
    if error is None:
        assert json.loads(last) == {"error": LOST, "code": "replica_lost"}
        return
    head, data = last.split("data: ")
    told = json.loads(data)
    assert head == name and told.pop("error") == {"message": LOST, **error}
    assert told == ({"type": "error"} if name else {})


ENDS = [
    (CHAT, b"data: [DONE]\n\n"),
    (CHAT, b'data: {"error":{"code":"engine_error"}}\n\n'),
    ("/v1/responses", b'event: response.completed\ndata: {"type":"response.completed"}\n\n'),
    ("/v1/messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
    ("/api/chat", b'{"done":true}\n'),
]


@pytest.mark.parametrize(("path", "end"), ENDS)
def test_a_replica_that_is_lost_after_the_last_event_ends_no_stream_twice(
    make: Make, path: str, end: bytes
) -> None:
    def end_and_die(exchange: Exchange) -> None:
        kind = "application/x-ndjson" if path == "/api/chat" else "text/event-stream"
        exchange.head(content_type=kind, transfer_encoding="chunked")
        exchange.chunk(end)
        exchange.cut()

    router = make(end_and_die)
    assert post(router, path).content == end
    router.wait(lambda: metric(router, "quire_route_in_flight") == 0)
    assert metric(router, 'quire_route_failures_total{when="during"}') == 0


ANTHROPIC_ERROR = b'event: error\ndata: {"type":"error","error":{"type":"%b","message":"m"}}\n\n'
ANTHROPIC_DRAIN = ANTHROPIC_ERROR.replace(b'"m"', b'"m","code":"not_ready"') % b"overloaded_error"
RESPONSE_FAILED = (
    b'event: response.failed\ndata: {"type":"response.failed","response":{"error":{"code":"server_error",'
    b'"message":"m","cause":"%b"}}}\n\n'
)


@pytest.mark.parametrize(
    ("path", "end", "load"),
    [
        (CHAT, b"data: [DONE]\n\n", 0),
        (CHAT, b'data: {"error":{"type":"server_error","code":"engine_error"}}\n\n', 24),
        (CHAT, b'data: {"error":{"type":"service_unavailable_error","code":"engine_stalled"}}\n\n', 24),
        (CHAT, b'data: {"error":{"type":"conflict_error","code":"stream_stopped"}}\n\n', 8),
        ("/v1/responses", RESPONSE_FAILED % b"engine_error", 24),
        ("/v1/responses", RESPONSE_FAILED % b"stream_stopped", 8),
        ("/v1/messages", ANTHROPIC_ERROR % b"api_error", 24),
        ("/v1/messages", ANTHROPIC_ERROR % b"invalid_request_error", 8),
        ("/v1/messages", ANTHROPIC_DRAIN, 8),
        ("/api/chat", b'{"error":"the engine failed: of something"}\n', 24),
        ("/api/chat", b'{"error":"the server is shutting down","code":"not_ready"}\n', 8),
        ("/api/generate", b'{"done":true}\n', 0),
    ],
)
def test_an_error_of_the_replicas_that_ends_a_stream_counts_as_its_failure(
    make: Make, path: str, end: bytes, load: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one that counts as 8. The client gets the replica's own words, once."""
    monkeypatch.setattr(failures, "HALF_LIFE_SECONDS", 1e9)

    def fail(exchange: Exchange) -> None:
        kind = "application/x-ndjson" if path.startswith("/api/") else "text/event-stream"
        exchange.head(content_type=kind, transfer_encoding="chunked")
        for data in (end, b""):
            exchange.chunk(data)

    router = make(fail)
    (known,) = router.server.state.replicas
    router.call(lambda: known.fared("failed", time.monotonic()))
    assert post(router, path).content == end
    router.wait(lambda: metric(router, "quire_route_in_flight") == 0)
    assert known.failures.load(time.monotonic()) == load


def test_a_stalled_engine_counts_as_a_failure(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other answers of this status are refusals of what nobody began."""
    monkeypatch.setattr(failures, "HALF_LIFE_SECONDS", 1e9)
    codes = iter(["worker_lost", "engine_stalled"])
    router = make(lambda exchange: exchange.reply(503, b'{"error":{"code":"%b"}}' % next(codes).encode()))
    (known,) = router.server.state.replicas
    for load in (0, 8):
        assert post(router).status_code == 503
        assert known.failures.load(time.monotonic()) == load


DONE, FAILURE = b"data: [DONE]\n\n", b'data: {"error":{"code":"engine_error"}}\n\n'


def answer_with(*chunks: bytes) -> Callable[[Exchange], None]:
    """Streams them, and ends in order."""

    def answer(exchange: Exchange) -> None:
        exchange.begin_stream()
        for data in (*chunks, b""):
            exchange.chunk(data)

    return answer


@pytest.mark.parametrize(
    "chunks", [(b"data: one\n\n" + FAILURE + DONE,), (b"data: one\n\n", FAILURE + b": keep-alive\n\n", DONE)]
)
def test_a_stream_has_one_last_event(make: Make, chunks: tuple[bytes, ...]) -> None:
    assert post(make(answer_with(*chunks))).content == b"data: one\n\n" + FAILURE


@pytest.mark.parametrize("half", [(), (b"data: [DO",)])
def test_a_stream_that_ends_without_a_last_event_is_lost(make: Make, half: tuple[bytes, ...]) -> None:
    """Although its body ends in order."""
    router = make(answer_with(b"data: one\n\n", *half))
    one, last, rest = post(router).content.split(b"\n\n")
    assert (one, rest) == (b"data: one", b"")
    assert json.loads(last[last.index(b"{") :])["error"]["code"] == "replica_lost"
    answer = post(make(answer_with(*half)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replica_lost")
    watched = httpx.get(f"{router.url}/v1/blocks/events", timeout=30)  # what is no answer ends as it likes
    assert watched.content == b"".join((b"data: one\n\n", *half))


def test_a_router_that_ends_adds_nothing_to_a_stream_that_has_ended(make: Make) -> None:
    """Although its replica has not closed it yet, and the router waits for nobody."""

    def end_and_hold(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.wait_until_gone()

    router = make(end_and_hold, shutdown_timeout=0)
    with httpx.stream("POST", f"{router.url}{CHAT}", json={}, timeout=30) as answer:
        chunks = answer.iter_raw()
        assert next(chunks) == b"data: [DONE]\n\n"
        router.server.stop_soon()
        assert not b"".join(chunks)
    router.thread.join(20)
    assert router.end() == 0


def be_silent(router: LiveRouter) -> None:
    """As if probes of the only replica had had no answer."""
    (known,) = router.server.state.replicas
    router.call(lambda: [known.note_probe(answered=False) for _ in range(SILENT_PROBES)])


def test_a_replica_that_stands_still_is_lost(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections stay, and nobody says anything on them."""
    monkeypatch.setattr(failures, "HALF_LIFE_SECONDS", 1e9)
    over = threading.Event()

    def stand_still(exchange: Exchange) -> None:
        if exchange.path == CHAT:
            exchange.begin_stream()
            exchange.chunk(b"data: one\n\n")
        else:
            be_silent(router)
        assert over.wait(30)

    router = make(stand_still)
    unary = post(router, "/v1/embeddings")
    assert (unary.status_code, unary.json()["error"]["code"]) == (502, "replica_lost")
    (known,) = router.server.state.replicas
    assert known.failures.load(time.monotonic()) == 8
    with httpx.stream("POST", f"{router.url}{CHAT}", json={}, timeout=30) as answer:
        chunks = answer.iter_raw()
        assert next(chunks) == b"data: one\n\n"
        be_silent(router)
        last = b"".join(chunks)
    assert json.loads(last[last.index(b"{") :])["error"]["code"] == "replica_lost"
    over.set()


def test_what_begins_nothing_is_asked_of_another_replica_than_one_that_stands_still(make: Make) -> None:
    over = threading.Event()
    router = make(lambda _: over.wait(30), say)
    silent, _ = router.server.state.replicas

    def give_up() -> None:
        router.wait(lambda: silent.in_flight == 1)
        router.call(lambda: [silent.note_probe(answered=False) for _ in range(SILENT_PROBES)])

    watching = threading.Thread(target=give_up)
    watching.start()
    answer = httpx.get(f"{router.url}/v1/models", timeout=30)
    assert (answer.status_code, answer.content) == (200, b"{}")
    assert answer.headers["x-quire-route"].endswith("attempt=2")
    watching.join()
    over.set()


class _Answer:
    status = 503

    def __init__(self) -> None:
        self.content = asyncio.StreamReader()
        self.content.feed_eof()

    async def __aenter__(self) -> _Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class _Session:
    """Nobody answers in time, but once."""

    def __init__(self) -> None:
        self.asked = 0

    def get(self, *_: object, **__: object) -> _Answer:
        self.asked += 1
        if self.asked == SILENT_PROBES:
            return _Answer()
        raise TimeoutError


@pytest.mark.anyio
async def test_probes_without_an_answer_tell_of_a_replica_that_stands_still() -> None:
    """So many in a row: any answer shows that it does not."""
    config = RouterConfig(model="tiny", replicas=("http://r:80",), probe_seconds=0)
    session = _Session()
    fleet = Fleet(config, session)  # type: ignore[arg-type]
    (replica,) = fleet
    given_up = asyncio.Event()
    with replica.request(give_up=given_up.set):
        probing = asyncio.create_task(fleet.probe())
        await given_up.wait()
        probing.cancel()
    assert session.asked >= 2 * SILENT_PROBES


def test_a_loss_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    """Also one without words, as of a probe that was not answered in time."""
    for reason in (TimeoutError(), "/ready says 503"):
        Replica("http://r:80", up=True).lost(reason)
    assert [record.getMessage() for record in caplog.records] == [
        "replica r:80 fails: TimeoutError",
        "replica r:80 fails: /ready says 503",
    ]
