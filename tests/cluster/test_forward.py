"""What the router passes on, what it tries again, and what a client sees of a replica that fails."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from quire.service.errors import ApiError, not_ready, worker_lost
from quire.service.http.codec import error_response
from quire.service.router import failures
from quire.service.router.placement import Location
from quire.service.router.sent_prefixes import UNPUBLISHED_SECONDS
from tests.cluster.stub_replica import Exchange, LiveRouter, StubReplica

CHAT = "/v1/chat/completions"
REPLY = b'{"answer": "\xc3\xa4"}'
EVENTS = [b"data: a\n\n", b': keep-alive\n\ndata: {"b"', b": 1}\n\nda", b"ta: [DONE]\n\n"]


def say(exchange: Exchange) -> None:
    exchange.reply(200, REPLY, x_own="kept", x_request_id="replica's")


def stream(exchange: Exchange) -> None:
    exchange.begin_stream(traceparent="t", x_quire_ignored="user", cache_control="no-store")
    for data in EVENTS:
        exchange.chunk(data)
    exchange.chunk(b"")


def busy(exchange: Exchange) -> None:
    exchange.reply(429, b'{"error": "full"}', retry_after="7")


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[LiveRouter, list[StubReplica]]]]:
    """Replicas that answer so, and a router that asks the first one first."""
    routers: list[LiveRouter] = []
    replicas: list[StubReplica] = []

    def build(*answers: Callable[[Exchange], object], **config: Any) -> tuple[LiveRouter, list[StubReplica]]:
        made = [StubReplica(answer) for answer in answers]
        replicas.extend(made)
        routers.append(LiveRouter(made, **config))
        routers[-1].prefer(made[0])
        return routers[-1], made

    yield build
    for router in routers:
        router.end()
    for replica in replicas:
        replica.close()


Make = Callable[..., tuple[LiveRouter, list[StubReplica]]]


def post(router: LiveRouter, path: str = CHAT, **options: Any) -> httpx.Response:
    return httpx.post(f"{router.url}{path}", json={"any": "thing"}, timeout=30, **options)


def metric(router: LiveRouter, name: str) -> float:
    text = httpx.get(f"{router.url}/metrics").text
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def test_everything_is_passed_on_and_back(make: Make) -> None:
    router, (replica,) = make(say)
    sent = b'{"messages": [ ], "odd":\t1}'
    headers = {"content-type": "application/json", "authorization": "Bearer k", "x-request-id": "mine"}
    answer = httpx.post(f"{router.url}{CHAT}?a=%2F&b=", content=sent, headers=headers)
    (got,) = replica.exchanges
    assert (got.method, got.path, got.body) == ("POST", f"{CHAT}?a=%2F&b=", sent)
    received = {name.lower(): value for name, value in got.headers.items()}
    assert received["authorization"] == "Bearer k"
    assert received["x-request-id"] == "mine"
    assert received["host"] == replica.name  # else its guard against DNS rebinding would refuse it
    assert answer.content == REPLY
    assert answer.headers["x-own"] == "kept"
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert answer.headers["x-quire-route"].startswith(f'replica="{replica.name}", reason=load')
    models = httpx.get(f"{router.url}/v1/models")
    assert models.content == REPLY
    got = replica.exchanges[1]
    assert got.method == "GET"
    received = {name.lower(): value for name, value in got.headers.items()}
    assert received["x-request-id"] == models.headers["x-request-id"] != "mine"  # one made by the router


def test_a_message_has_its_id_once_as_anthropics_clients_look_for_it(make: Make) -> None:
    def say_with_id(exchange: Exchange) -> None:
        exchange.reply(200, REPLY, request_id=exchange.headers["x-request-id"])

    router, _ = make(say_with_id)
    for path, names in (("/v1/messages", ("request-id", "x-request-id")), (CHAT, ("x-request-id",))):
        answer = httpx.post(f"{router.url}{path}", json={}, headers={"x-request-id": "mine"})
        for name in names:
            assert answer.headers.get_list(name) == ["mine"]


def test_a_stream_is_passed_byte_for_byte(make: Make) -> None:
    router, (_replica,) = make(stream)
    answer = post(router)
    assert answer.content == b"".join(EVENTS)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers.get_list("cache-control") == ["no-store"]
    assert answer.headers.get_list("x-quire-ignored") == ["user"]
    assert answer.headers["traceparent"] == "t"
    assert "x-quire-route" in answer.headers


def test_events_come_as_they_are_sent(make: Make) -> None:
    more = threading.Event()

    def slowly(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange.chunk(EVENTS[0])
        assert more.wait(30)
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.chunk(b"")

    router, _ = make(slowly)
    with httpx.stream("POST", f"{router.url}{CHAT}", json={}, timeout=30) as answer:
        chunks = answer.iter_raw()
        assert next(chunks) == EVENTS[0]
        more.set()
        assert b"".join(chunks) == b"data: [DONE]\n\n"


def refuse(exchange: Exchange) -> None:
    exchange.reply(503, b'{"error": "draining"}')


def cut_at_once(exchange: Exchange) -> None:
    exchange.cut()


def cut_before_an_event(exchange: Exchange) -> None:
    exchange.begin_stream(x_own="of an answer that did not begin")
    exchange.chunk(b"data: half an ev")
    exchange.cut()


def fail_in_a_stream(exchange: Exchange) -> None:
    exchange.begin_stream()
    for data in (b"data: one\n\n", b'data: {"error":{"code":"engine_error"}}\n\n', b""):
        exchange.chunk(data)


def cut_in_a_body(exchange: Exchange) -> None:
    exchange.head(content_type="application/json", content_length="1000")
    exchange.handler.wfile.write(b"{")
    exchange.cut()


def bad_gateway(exchange: Exchange) -> None:
    exchange.reply(502, b'{"error": {"code": "replica_lost"}}')


def stalled(exchange: Exchange) -> None:
    exchange.reply(503, b'{"error":{"message":"stuck","code":"engine_stalled"}}', retry_after="5")


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (cut_at_once, 502, "replica_lost"),
        (cut_before_an_event, 502, "replica_lost"),
        (cut_in_a_body, 502, "replica_lost"),
        (bad_gateway, 502, "replica_lost"),
        (stalled, 503, "engine_stalled"),
        (lambda exchange: exchange.reply(500, b'{"error":{"code":"engine_error"}}'), 500, "engine_error"),
        (lambda exchange: exchange.reply(500, b'{"error":{"code":"engine_dead"}}'), 502, "replica_lost"),
    ],
)
def test_what_made_a_replica_fail_is_given_to_no_other(
    make: Make, failure: Callable[[Exchange], object], status: int, code: str
) -> None:
    """A request that may have begun: else one that kills an engine would kill all of them."""
    router, (first, second) = make(failure, say)
    answer = post(router)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert len(first.exchanges) == 1
    assert not second.exchanges
    assert "x-own" not in answer.headers
    assert answer.headers["x-quire-route"].endswith("attempt=1")
    assert metric(router, "quire_route_retries_total") == 0
    router.prefer(second)
    assert post(router).content == REPLY  # another request is answered


def answer_raw(head: bytes) -> Callable[[Exchange], object]:
    return lambda exchange: exchange.handler.wfile.write(b"HTTP/1.1 " + head + b"\r\n\r\n")


@pytest.mark.parametrize(
    "head",
    [
        b"600 X\r\ncontent-length: 0",
        b"999 X\r\ncontent-length: 0",
        b"101 X\r\nconnection: upgrade\r\nupgrade: x",
        b"200 OK\r\nx-own: a\x01b\r\ncontent-length: 0",
    ],
)
def test_an_answer_that_cannot_be_passed_on_is_none(make: Make, head: bytes) -> None:
    router, _ = make(answer_raw(head))
    answer = post(router)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replica_lost")


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_without_a_body_tells_no_length(make: Make, status: int) -> None:
    router, _ = make(answer_raw(b"%d X\r\nx-own: kept\r\ncontent-length: 10" % status))
    answer = post(router)
    assert (answer.status_code, answer.content, answer.headers["x-own"]) == (status, b"", "kept")
    assert "content-length" not in answer.headers


@pytest.mark.parametrize(
    "failure",
    [
        cut_at_once,
        lambda exchange: exchange.reply(500, b'{"error":{"code":"engine_error"}}'),
        fail_in_a_stream,
    ],
)
def test_who_fails_at_once_does_not_draw_all_requests(
    make: Make, failure: Callable[[Exchange], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it has nothing to do, and says that it is ready."""
    monkeypatch.setattr(failures, "HALF_LIFE_SECONDS", 1e9)
    router, (first, *_) = make(failure, say, say)
    good = [post(router).content == REPLY for _ in range(20)]
    assert good.count(True) >= 16
    assert 1 <= len(first.exchanges) <= 4
    first.answer = say
    others = [replica for replica in router.server.state.replicas if replica.url != first.url]
    router.call(lambda: [setattr(replica, "in_flight", 100_000) for replica in others])
    router.wait(lambda: first.name in post(router).headers["x-quire-route"])
    assert "load=0," in post(router).headers["x-quire-route"]  # one that succeeds ends the row


def test_what_begins_nothing_is_asked_of_another_replica(make: Make) -> None:
    router, (_first, second) = make(cut_in_a_body, say)
    assert httpx.get(f"{router.url}/v1/models", timeout=30).content == REPLY
    assert len(second.exchanges) == 1


@pytest.mark.parametrize("failure", [refuse, busy])
def test_another_replica_answers_before_the_first_byte(
    make: Make, failure: Callable[[Exchange], object]
) -> None:
    router, (first, second) = make(failure, say)
    answer = post(router)
    assert answer.content == REPLY
    assert len(first.exchanges) == len(second.exchanges) == 1
    assert first.exchanges[0].body == second.exchanges[0].body
    assert answer.headers["x-quire-route"].endswith("attempt=2")
    assert metric(router, "quire_route_retries_total") == 1
    assert metric(router, 'quire_route_failures_total{when="before"}') == 0


@pytest.mark.parametrize("failure", [busy, refuse])
def test_a_prompt_is_remembered_where_it_was_taken(
    make: Make, failure: Callable[[Exchange], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [bytes([number]) * 16 for number in range(4)]
    router, (first, _second) = make(failure, say)
    replicas = {replica.url: replica for replica in router.server.state.replicas}

    async def locate(_: object) -> Location:
        return Location(70, {"f": digests}, {"f": 16}, None)

    def register() -> None:
        monkeypatch.setattr(router.server.state, "locate", locate)
        for replica in replicas.values():
            replica.fingerprint = "f"

    router.call(register)
    assert post(router).headers["x-quire-route"].endswith("attempt=2")
    taken = replicas.pop(first.url).sent_prefixes, replicas.popitem()[1].sent_prefixes
    now = time.monotonic()
    assert [recent.match(digests, now) for recent in taken] == [0, 4]
    assert taken[1].unpublished(digests, now + UNPUBLISHED_SECONDS) == 0  # for its answer has begun


@pytest.mark.parametrize(
    ("body", "is_out"),
    [
        (b'{"error":{"message":"m","code":"not_ready"}}', True),
        (b'{"error":{"message":"m","code":"engine_dead"}}', True),
        (b'{"error":{"message":"m","code":"engine_stalled"}}', True),
        (b'{"type":"error","error":{"type":"overloaded_error","message":"m"}}', True),
        (b'{"error":{"message":"m","code":"response_store_unavailable"}}', False),
    ],
)
def test_a_replica_is_out_if_it_takes_no_requests_at_all(
    make: Make, body: bytes, is_out: bool, caplog: pytest.LogCaptureFixture
) -> None:
    router, (first, _second) = make(lambda exchange: exchange.reply(503, body), say)
    post(router)
    assert (f"replica {first.name} fails: it answers 503" in caplog.messages) == is_out


@pytest.mark.parametrize(
    ("error", "status", "is_out"),
    [
        (ApiError(503, "m", code="engine_stalled"), 503, True),
        (ApiError(500, "m", code="engine_dead"), 502, True),
        (not_ready("m"), 200, True),
        (worker_lost("m"), 200, False),
        (ApiError(429, "m", code="queue_full"), 200, False),
    ],
)
def test_what_a_replica_says_counts_in_all_forms_of_errors(
    make: Make, error: ApiError, status: int, is_out: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a body has no place for the code: whether it may have begun, and whether it takes others."""
    paths = [CHAT, "/v1/messages", "/api/chat"]

    def fail(exchange: Exchange) -> None:
        told = error_response(error, exchange.path)
        headers = {name.decode(): value.decode() for name, value in told.raw_headers}
        del headers["content-length"], headers["content-type"]
        exchange.reply(told.status_code, bytes(told.body), **headers)

    router, (first, second) = make(fail, say)
    for path in paths:
        router.wait(lambda: all(replica.up for replica in router.server.state.replicas))
        router.prefer(first)
        answer = post(router, path)
        assert answer.status_code == status
        assert answer.headers.get("x-quire-error") == {503: "engine_stalled", 502: "replica_lost"}.get(status)
    assert len(first.exchanges) == len(paths)
    assert len(second.exchanges) == (len(paths) if status == 200 else 0)
    lost = [message for message in caplog.messages if message.startswith(f"replica {first.name} fails")]
    assert len(lost) == (len(paths) if is_out else 0)


def test_another_replica_answers_for_one_that_refuses_connections(make: Make) -> None:
    router, (first, second) = make(say, say)
    first.close()
    for _ in range(3):
        assert post(router).content == REPLY
    router.wait(lambda: metric(router, 'quire_route_replicas{state="down"}') == 1)
    assert len(second.exchanges) == 3


def test_nobody_answers(make: Make) -> None:
    """What a replica said goes to the client; if none said anything, the router does."""
    router, (first, second) = make(busy, busy)
    answer = post(router)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert len(first.exchanges) == len(second.exchanges) == 1
    for replica in (first, second):
        replica.close()
    answer = post(router)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    assert "retry-after" in answer.headers
    router.wait(lambda: httpx.get(f"{router.url}/ready").status_code == 503)
    assert httpx.get(f"{router.url}/health").status_code == 200


RESPONSE = "resp_" + "a" * 48


def know_nothing(exchange: Exchange) -> None:
    exchange.reply(400, b'{"error":{"message":"m","code":"previous_response_not_found"}}')


def go_on(router: LiveRouter, **headers: str) -> httpx.Response:
    body = {"input": "a", "previous_response_id": RESPONSE}
    return httpx.post(f"{router.url}/v1/responses", json=body, headers=headers, timeout=30)


def test_ids_of_a_response_that_goes_on_are_where_it_went(make: Make) -> None:
    router, (storer, other) = make(
        lambda exchange: exchange.reply(200, b'{"id":"%b"}' % RESPONSE.encode()), say
    )
    post(router, "/v1/responses")
    router.prefer(other)
    go_on(router, **{"x-stream-id": "s", "x-request-id": "mine"})
    post(router, headers={"x-stream-id": "s"})  # which is refused where it is in use
    httpx.get(f"{router.url}/v1/requests/mine/why")
    assert len(storer.exchanges) == 4
    assert not other.exchanges


def test_all_are_asked_for_a_response_before_it_is_not_there(make: Make) -> None:
    router, replicas = make(*[know_nothing] * 4, say)
    router.call(lambda: setattr(list(router.server.state.replicas)[-1], "in_flight", 1000))
    assert go_on(router).content == REPLY
    replicas[-1].answer = know_nothing
    answer = go_on(router)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")
    assert [len(replica.exchanges) for replica in replicas] == [2] * 5


@pytest.mark.parametrize("failure", [busy, refuse])
def test_a_response_of_a_busy_replica_is_not_said_not_to_be_there(
    make: Make, failure: Callable[[Exchange], object]
) -> None:
    """Nor is one of a replica that does not answer: the others do not have it, and it may be there."""
    router, (storer, other) = make(
        lambda exchange: exchange.reply(200, b'{"id":"%b"}' % RESPONSE.encode()), know_nothing
    )
    assert post(router, "/v1/responses").status_code == 200
    storer.answer = failure
    answer = go_on(router)
    assert answer.status_code in (429, 503)
    assert len(other.exchanges) == 1
    storer.close()
    answer = go_on(router)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    assert "retry-after" in answer.headers


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/streams/mine", 429), (f"/v1/responses/{RESPONSE}", 503), ("/v1/requests/mine/why", 500)],
)
def test_who_is_busy_or_fails_hides_no_stream_of_another_replica(make: Make, path: str, status: int) -> None:
    router, (_first, second) = make(lambda exchange: exchange.reply(status, b'{"error":{"code":"c"}}'), say)
    assert httpx.get(f"{router.url}{path}", timeout=30).content == REPLY
    second.answer = lambda exchange: exchange.reply(404, b"{}")
    assert httpx.get(f"{router.url}{path}", timeout=30).status_code == status


def test_an_error_of_the_request_is_not_tried_again(make: Make) -> None:
    router, (_first, second) = make(lambda exchange: exchange.reply(400, b'{"error": 1}'), say)
    assert post(router).status_code == 400
    assert not second.exchanges


def test_a_stream_that_breaks_off_ends_with_an_error_event(make: Make) -> None:
    def break_off(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange.chunk(b"data: one\n\ndata: tw")
        exchange.chunk(b"o\n\ndata: thr")
        exchange.cut()

    router, (_first, second) = make(break_off, say)
    events = post(router).content.split(b"\n\n")
    assert events[:2] == [b"data: one", b"data: two"]
    assert json.loads(events[2].removeprefix(b"data: "))["error"]["code"] == "replica_lost"
    assert events[3:] == [b""]
    assert not second.exchanges
    assert metric(router, 'quire_route_failures_total{when="during"}') == 1


def test_a_client_that_leaves_is_gone_for_the_replica_too(make: Make) -> None:
    def hold(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange.chunk(EVENTS[0])
        exchange.wait_until_gone()

    router, (replica,) = make(hold)
    with httpx.stream("POST", f"{router.url}{CHAT}", json={}, timeout=30) as answer:
        chunks = answer.iter_raw()
        assert next(chunks) == EVENTS[0]
        assert metric(router, "quire_route_in_flight") == 1
    assert replica.exchanges[0].gone.wait(30)
    router.wait(lambda: metric(router, "quire_route_in_flight") == 0)


def test_replicas_that_drain_get_nothing_and_come_back(make: Make) -> None:
    router, (first, second) = make(say, say)
    first.ready_status = 503
    router.wait(lambda: metric(router, 'quire_route_replicas{state="ready"}') == 1)
    assert post(router).content == REPLY
    assert len(second.exchanges) == 1
    first.ready_status = 200
    router.wait(lambda: metric(router, 'quire_route_replicas{state="ready"}') == 2)
    assert post(router).content == REPLY
    assert len(first.exchanges) == 1


def test_the_router_drains(make: Make) -> None:
    """Answers that run may end, what never would ends at once, what is new is refused; it is not ready."""
    more = threading.Event()

    def slowly(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange.chunk(EVENTS[0])
        if exchange.path != CHAT:
            exchange.wait_until_gone()
            return
        assert more.wait(30)
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.chunk(b"")

    router, (_replica,) = make(slowly)
    with (
        httpx.stream("POST", f"{router.url}{CHAT}", json={}, timeout=30) as answer,
        httpx.stream("GET", f"{router.url}/v1/blocks/events", timeout=30) as watched,
    ):
        chunks, endless = answer.iter_raw(), watched.iter_raw()
        assert next(chunks) == next(endless) == EVENTS[0]
        router.server.stop_soon()
        router.wait(lambda: router.server.state.draining)
        assert httpx.get(f"{router.url}/ready").status_code == 503
        assert post(router).status_code == 503
        last = b"".join(endless)
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "not_ready"
        more.set()
        assert b"".join(chunks) == b"data: [DONE]\n\n"
    router.thread.join(20)
    assert router.end() == 0


def test_the_routers_own_gate(make: Make) -> None:
    router, (replica,) = make(say, api_keys=("key",), max_body_bytes=1000)
    assert post(router).status_code == 401
    assert post(router, headers={"authorization": "Bearer key"}).content == REPLY
    large = httpx.post(f"{router.url}{CHAT}", json={"a": "b" * 2000}, headers={"authorization": "Bearer key"})
    assert large.status_code == 413
    assert httpx.get(f"{router.url}/").content == REPLY  # the page, which needs no key
    wrong = httpx.post(f"{router.url}/health", json={})
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD")
    assert wrong.json()["error"]["message"] == "/health does not take POST, but GET"
    assert [exchange.path for exchange in replica.exchanges] == [CHAT, "/"]


CHUNKED = b"Host: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_key_in_a_trailer_opens_nothing(make: Make) -> None:
    router, (replica,) = make(say, api_keys=("key",))
    request = (
        f"POST {CHAT} HTTP/1.1\r\n".encode() + CHUNKED + b"2\r\n{}\r\n0\r\nAuthorization: Bearer key\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", router.port), 30) as connection:
        connection.sendall(request)
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")
    assert not replica.exchanges


@pytest.mark.parametrize("key", [b"", b"Authorization: Bearer key\r\n"])
def test_a_trailer_without_end_is_cut(make: Make, key: bytes) -> None:
    router, _ = make(say, api_keys=("key",), max_header_bytes=16 << 10)
    with socket.create_connection(("127.0.0.1", router.port), 30) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\n".encode() + key + CHUNKED + b"2\r\n{}\r\n0\r\n")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(16 << 10):
                connection.sendall(b"X-Trailer: y\r\n" * 300)


def test_doubled_keys_are_refused(make: Make) -> None:
    router, (replica,) = make(say, api_keys=("key",))
    keys = [("authorization", "Bearer wrong"), ("authorization", "Bearer key")]
    for headers in (keys, keys[::-1], [keys[1], keys[1]]):
        answer = httpx.get(f"{router.url}/v1/models", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "doubled_header")
    assert not replica.exchanges
