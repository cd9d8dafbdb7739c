"""Streams that are picked up again: nothing is lost and nothing comes twice, wherever they were cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.service.answer.resumption.ring import MIN_EVENTS, EventId, EventRing
from quire.service.app import create_app
from quire.service.config import ServiceConfig
from quire.service.errors import ApiError, not_ready
from quire.service.state import ServerState
from quire.service.text.tokenizer import Tokenizer
from quire.service.watchdog import DEFAULT_TIMEOUT_ON_CPU
from tests.service.asgi import Exchange, exchange, get, post, settle
from tests.service.conftest import Service
from tests.service.fake_engine import FakeEngine, make_info
from tests.service.inline_renderer import InlineRenderer
from tests.service.live import Live

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "hello"}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a b c", "max_tokens": 12}),
    ("/v1/completions", {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 5, "stop": "zz", "logprobs": 1}),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "stream_options": {"include_usage": True}, "max_tokens": 9},
    ),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 9}),
]
PATH, BODY = REQUESTS[0]
ENDS = re.compile(
    rb'\[DONE\]|"type":"response\.(incomplete|failed)"|CUDA error|shutting down|taken_over|engine_stalled'
    rb"|stream_stopped"
)


def begin(service: Service, path: str = PATH, stream_id: str = "s", **body: Any) -> Exchange:
    return exchange(service.app, path, {**(body or BODY), "stream": True}, x_stream_id=stream_id)


def resume(service: Service, last: str | None = None, stream_id: str = "s", **headers: str) -> Exchange:
    given = {"last-event-id": last} if last is not None else {}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    return Exchange(service.app, "GET", f"/v1/streams/{stream_id}", b"", given).start()


def events_of(data: bytes) -> list[tuple[str, bytes]]:
    """(id, the rest) of all whole events, comments left out."""
    blocks = [block for block in data.split(b"\n\n")[:-1] if not block.startswith(b":")]
    found = [re.fullmatch(rb"id: ([0-9.]+)\n(.*)", block, re.DOTALL) for block in blocks]
    return [(match[1].decode(), match[2]) for match in found if match is not None]


async def until(condition: Callable[[], object]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


async def leave(running: Exchange) -> None:
    running.leave()
    assert running.task is not None
    await running.task


async def drive(service: Service, running: Exchange) -> bytes:
    """To its end. Returns the body."""
    assert running.task is not None
    while not running.task.done():
        if service.engine.active:
            service.engine.step()
        await asyncio.sleep(0)
    return running.body


@pytest.fixture
async def manual(make_service: Callable[..., Service]) -> Service:
    """Nothing moves until the test says so."""
    return make_service(auto=False)


def make_manual(tokenizer: Tokenizer, **config: Any) -> Service:
    state = ServerState(ServiceConfig(served_model_names=("tiny",), **config))
    state.renderer = InlineRenderer()
    engine = FakeEngine(make_info(tokenizer), auto=False)
    state.set_engine(engine)
    engine.become_ready()
    state.tokenizer = tokenizer
    return Service(create_app(state), state, engine)


CUTS = st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1), st.integers(0, 4)), max_size=8)


@settings(max_examples=70, deadline=None)
@given(st.sampled_from(REQUESTS), CUTS)
def test_what_was_read_in_pieces_is_the_uncut_stream(
    tokenizer: Tokenizer, request_: tuple[str, dict[str, Any]], cuts: list[tuple[int, float, int]]
) -> None:
    """Of each piece the client has the first so many bytes, and so the whole events among them."""
    path, body = request_

    async def live() -> None:
        service = make_manual(tokenizer)
        running = begin(service, path, **body)
        await service.engine.until_added(len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)
        got: list[tuple[str, bytes]] = []
        for before, share, meanwhile in cuts:
            for _ in range(before):
                service.engine.step()
                await settle()
            received = running.body[: round(share * len(running.body))]
            await leave(running)
            got += events_of(received)
            for _ in range(meanwhile):
                service.engine.step()
                await settle()
            running = resume(service, got[-1][0] if got else None)
        got += events_of(await drive(service, running))
        assert not service.state.generations
        uncut = events_of(await drive(service, resume(service)))
        assert got == uncut
        ids = [EventId.parse(event_id) for event_id, _ in got]
        assert ids == sorted(set(ids))
        assert ids[-1].tokens == sum(sum(stream.done) for stream in service.engine.streams)
        assert all(not stream.aborted for stream in service.engine.streams)
        assert text_of(events_of(await drive(service, begin(service, path, "t", **body)))) == text_of(got)

    asyncio.run(live())


ACTIONS = st.lists(
    st.sampled_from(["step", "step", "wait", "read on", "from the beginning", "leave", "stall", "read"]),
    max_size=20,
)


@settings(max_examples=70, deadline=None)
@given(
    st.sampled_from([REQUESTS[0], REQUESTS[3]]),
    ACTIONS,
    st.sampled_from(["", "die", "interrupt", "stick"]),
    ACTIONS,
)
def test_a_stream_ends_once_for_whoever_reads_it(
    tokenizer: Tokenizer,
    request_: tuple[str, dict[str, Any]],
    before: list[str],
    fault: str,
    after: list[str],
) -> None:
    async def live() -> None:
        service = make_manual(tokenizer)
        readers = [begin(service, request_[0], **request_[1])]
        await service.engine.until_added(1)
        for action in [*before, fault, *after]:
            if action == "step":
                service.engine.step()
            elif action == "wait":
                await settle()
            elif action == "leave":
                readers[-1].leave()
            elif action in ("stall", "read"):
                (readers[-1].readable.clear if action == "stall" else readers[-1].readable.set)()
            elif action in ("read on", "from the beginning"):
                got = events_of(b"".join(reader.body for reader in readers))
                last = max((EventId.parse(event_id) for event_id, _ in got), default=None)
                known = last is not None and action == "read on"
                readers.append(resume(service, str(last) if known else None))
            elif action == "die":
                service.engine.die("CUDA error")
            elif action == "stick":
                service.engine.stalled = DEFAULT_TIMEOUT_ON_CPU + 1
                service.state.watchdog.look(service.engine)
            elif action == "interrupt":
                for each in list(service.state.generations):
                    each.interrupt(not_ready("the server is shutting down"))
        for reader in readers:
            reader.readable.set()
        for _ in range(30):
            service.engine.step()
            await settle()
        for reader in readers:
            reader.leave()
            assert reader.task is not None
            await reader.task
        assert not service.state.generations and not service.engine.active
        bodies = [reader.body for reader in readers if reader.sent and reader.sent[0]["status"] == 200]
        for reader in readers:
            ends = [bool(ENDS.search(event)) for event in reader.body.split(b"\n\n")]
            assert ends.count(True) <= 1 and not any(ends[:-2])
        whole = await resume(service).finish()
        if whole.status == 200:
            events = events_of(whole.body)
            assert [bool(ENDS.search(event)) for _, event in events].count(True) == 1
            assert ENDS.search(events[-1][1])
            got = set(events_of(b"".join(bodies)))
            assert got <= set(events)
        else:  # it failed before its first event
            assert fault and not any(events_of(body) for body in bodies)

    asyncio.run(live())


def text_of(events: list[tuple[str, bytes]]) -> dict[int, str]:
    """By choice."""
    texts: dict[int, str] = {}
    for _, event in events:
        data = event.split(b"data: ")[1]
        parsed = {} if data == b"[DONE]" else json.loads(data)
        if "delta" in parsed:
            texts[0] = texts.get(0, "") + parsed["delta"]
        for choice in parsed.get("choices", []):
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_the_same_events_as_without_it(manual: Service, path: str, body: dict[str, Any]) -> None:
    """But for ids and times; and without the header there are no ids."""
    bodies = []
    for header in ({"x_stream_id": "s"}, {}):
        running = exchange(manual.app, path, {**body, "seed": 1, "stream": True}, **header)
        await settle()
        while manual.engine.active:
            manual.engine.step()
            await settle()
        bodies.append((await running.finish()).body)
    with_ids, without = bodies
    assert not re.search(rb"^id:", without, re.MULTILINE)
    stripped = b"".join(event + b"\n\n" for _, event in events_of(with_ids))
    changing = rb'"(cmpl|chatcmpl)-[0-9a-f]+"|"(resp|msg)_[0-9a-f]+"|"created(_at)?":\d+'
    assert re.sub(changing, b"", stripped) == re.sub(changing, b"", without)
    assert len(events_of(with_ids)) == without.count(b"\n\n")


async def test_ids_are_token_positions(service: Service) -> None:
    body = (await begin(service, max_tokens=3, prompt="abc").finish()).body
    assert [event_id for event_id, _ in events_of(body)] == ["1", "2", "3", "3.1"]


async def test_it_goes_on_while_nobody_reads_and_is_aborted_in_the_end(tokenizer: Tokenizer) -> None:
    service = make_manual(tokenizer, resume_timeout=0.05)
    running = begin(service)
    await service.engine.until_added(1)
    service.engine.step()
    await settle()
    await leave(running)
    assert not service.engine.streams[0].aborted
    again = resume(service, "1")
    await asyncio.sleep(0.1)  # as long as there is a reader, it has time
    service.engine.step()
    await again.until(b"id: 2\n")
    await leave(again)
    await until(lambda: service.engine.streams[0].aborted)
    await settle()
    assert not service.state.generations
    assert (await resume(service, "2").finish()).status == 404
    assert await drive(service, begin(service))  # the id is free again


async def test_an_ended_stream_is_forgotten_in_the_end(make_service: Callable[..., Service]) -> None:
    service = make_service(resume_timeout=0.05)
    whole = (await begin(service).finish()).body
    assert (await resume(service).finish()).body == whole
    await until(lambda: not service.state.recordings._ended)
    assert (await resume(service).finish()).error["code"] == "stream_not_found"


async def test_without_the_header_a_disconnect_aborts(manual: Service) -> None:
    running = exchange(manual.app, PATH, {**BODY, "stream": True})
    await manual.engine.until_added(1)
    manual.engine.step()
    await running.until(b"data: ")
    await leave(running)
    assert manual.engine.streams[0].aborted


async def test_all_was_read(service: Service) -> None:
    whole = events_of((await begin(service).finish()).body)
    reply = await resume(service, whole[-1][0]).finish()
    assert (reply.status, reply.body) == (204, b"")
    assert events_of((await resume(service, whole[-2][0]).finish()).body) == whole[-1:]


async def test_a_second_reader_takes_over(manual: Service) -> None:
    first = begin(manual)
    await manual.engine.until_added(1)
    manual.engine.step()
    await first.until(b"id: 1\n")
    second = resume(manual, "1")
    last = (await first.finish()).body.split(b"data: ")[-1]  # which has no id
    assert json.loads(last)["error"]["code"] == "stream_taken_over"
    third = resume(manual)  # before the second one got anything
    reply = await second.finish()
    assert (reply.status, reply.error["code"]) == (409, "stream_taken_over")
    got = events_of(await drive(manual, third))
    assert got[0][0] == "1" and got[-1][1] == b"data: [DONE]"
    assert not manual.state.generations


async def test_an_id_in_use(manual: Service) -> None:
    running = begin(manual)
    await manual.engine.until_added(1)
    reply = await begin(manual).finish()
    assert (reply.status, reply.error["code"], reply.error["param"]) == (
        409,
        "stream_id_in_use",
        "x-stream-id",
    )
    assert manual.engine.streams[1].aborted  # it was refused before it cost anything
    await drive(manual, running)
    assert (await begin(manual).finish()).status == 409  # its events may still be asked for
    assert manual.state.queue.prompts == 0


async def test_streams_belong_to_their_key(make_service: Callable[..., Service]) -> None:
    service = make_service(api_keys=("one", "two"))
    mine, other = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
    body = {**BODY, "stream": True}
    whole = (await post(service.app, PATH, body, x_stream_id="s", **mine)).body
    assert (await get(service.app, "/v1/streams/s")).status == 401
    assert (await resume(service, "1", **other).finish()).status == 404
    assert (await resume(service, **mine).finish()).body == whole
    theirs = await post(service.app, PATH, body, x_stream_id="s", **other)  # the same id is another stream
    assert theirs.status == 200


@pytest.mark.parametrize("stream_id", ["", "a b", "a/b", "ä", "x" * 65, "a\n"])
async def test_bad_stream_ids(service: Service, stream_id: str) -> None:
    reply = await begin(service, stream_id=stream_id).finish()
    assert (reply.status, reply.error["param"]) == (400, "x-stream-id")
    assert all(stream.aborted for stream in service.engine.streams)


@pytest.mark.parametrize("last", ["", "x", "-1", "1.", "1.2.3", "0x1", "1" * 11, "99", "1.1"])
async def test_bad_last_event_ids(service: Service, last: str) -> None:
    await begin(service).finish()
    reply = await resume(service, last).finish()
    assert (reply.status, reply.error["param"]) == (400, "last-event-id")


async def test_headers_where_they_mean_nothing(service: Service) -> None:
    reply = await post(service.app, PATH, BODY, x_stream_id="s")
    assert (reply.status, reply.error["param"]) == (400, "x-stream-id")
    reply = await post(service.app, PATH, {**BODY, "stream": True}, last_event_id="1")
    assert (reply.status, reply.error["param"]) == (400, "last-event-id")
    assert (await Exchange(service.app, "HEAD", "/v1/streams/s").start().finish()).status == 405
    assert service.state.queue.prompts == 0


async def test_one_that_is_stopped_before_it_runs_generates_nothing(manual: Service) -> None:
    running = begin(manual)
    started = None
    while started is None:
        await asyncio.sleep(0)
        with contextlib.suppress(ApiError):
            started = manual.state.recordings.find("", "s")
    assert started.stop()
    await settle()
    assert started.ended and [stream.aborted for stream in manual.engine.streams] == [True]
    reply = await running.finish()
    assert (reply.status, reply.error["code"]) == (409, "stream_stopped")


async def test_a_response_that_is_stopped_says_so(manual: Service) -> None:
    """OpenAI's codes have none for it: the replica has not failed."""
    running = begin(manual, "/v1/responses", input="hello")
    await until(lambda: manual.engine.active)
    manual.engine.step()
    await settle()
    await Exchange(manual.app, "DELETE", "/v1/streams/s").start().finish()
    _, last = events_of(await drive(manual, running))[-1]
    assert last.startswith(b"event: response.failed\n")
    error = json.loads(last.partition(b"data: ")[2])["response"]["error"]
    assert (error["code"], error["cause"]) == ("server_error", "stream_stopped")


async def test_a_delete_stops_it(manual: Service) -> None:
    running = begin(manual)
    await until(lambda: manual.engine.active)
    manual.engine.step()
    reply = await Exchange(manual.app, "DELETE", "/v1/streams/s").start().finish()
    assert (reply.status, json.loads(reply.body)) == (200, {"id": "s", "stopped": True})
    body = await drive(manual, running)
    assert len(ENDS.findall(body)) == 1
    assert b"stream_stopped" in events_of(body)[-1][1]
    assert [stream.aborted for stream in manual.engine.streams] == [True]
    again = await Exchange(manual.app, "DELETE", "/v1/streams/s").start().finish()
    assert json.loads(again.body) == {"id": "s", "stopped": False}
    assert (await Exchange(manual.app, "DELETE", "/v1/streams/t").start().finish()).status == 404


async def test_forgotten_events(tokenizer: Tokenizer) -> None:
    service = make_manual(tokenizer, max_stream_bytes=2000)
    running = begin(service, prompt="abc", max_tokens=60)
    await service.engine.until_added(1)
    assert len(events_of(await drive(service, running))) == 61  # who keeps up misses nothing
    for last in (None, "1", "40"):
        reply = await resume(service, last).finish()
        assert (reply.status, reply.error["code"]) == (410, "events_forgotten")
    assert [event_id for event_id, _ in events_of((await resume(service, "59").finish()).body)] == [
        "60",
        "60.1",
    ]


async def test_a_reader_that_is_too_slow_is_cut(tokenizer: Tokenizer) -> None:
    service = make_manual(tokenizer, max_stream_bytes=2000)
    running = begin(service, prompt="abc", max_tokens=60)
    await service.engine.until_added(1)
    running.readable.clear()
    for _ in range(60):
        service.engine.step()
        await settle()
    running.readable.set()
    assert running.task is not None
    await running.task
    assert running.left
    assert b"[DONE]" not in running.body


async def test_failure_before_the_first_event_is_a_status(manual: Service) -> None:
    running = begin(manual)
    await manual.engine.until_added(1)
    manual.engine.die("CUDA error")
    reply = await running.finish()
    assert (reply.status, reply.error["code"]) == (500, "engine_dead")
    assert (await resume(manual).finish()).status == 500


@pytest.mark.parametrize(("path", "body"), [REQUESTS[0], REQUESTS[3]])
@pytest.mark.parametrize("read", [True, False])
async def test_failure_is_the_last_event(
    manual: Service, path: str, body: dict[str, Any], read: bool
) -> None:
    running = begin(manual, path, **body)
    await manual.engine.until_added(1)
    for _ in range(3):
        manual.engine.step()
        await settle()
    if not read:
        await leave(running)
    manual.engine.die("CUDA error")
    if not read:
        await settle()
        running = resume(manual)
    reply = await running.finish()
    assert reply.status == 200
    assert reply.body.count(b"CUDA error") == 1
    assert b"CUDA error" in events_of(reply.body)[-1][1]
    assert b"[DONE]" not in reply.body
    assert not manual.state.generations


@pytest.mark.parametrize("read", [True, False])
async def test_a_drain_interrupts_it(manual: Service, read: bool) -> None:
    running = begin(manual)
    await manual.engine.until_added(1)
    manual.engine.step()
    await running.until(b"id: 1\n")
    if not read:
        await leave(running)
    (recording,) = manual.state.generations
    manual.state.draining = True
    recording.interrupt(not_ready("the server is shutting down"))
    await settle()
    if not read:
        running = resume(manual, "1")  # what was begun may be read to its end
    reply = await running.finish()
    assert b"shutting down" in events_of(reply.body)[-1][1]
    assert manual.engine.streams[0].aborted
    assert not manual.state.generations


async def test_a_drain_waits_until_the_reader_has_the_end(manual: Service) -> None:
    running = begin(manual)
    await manual.engine.until_added(1)
    running.readable.clear()
    for _ in range(12):
        manual.engine.step()
        await settle()
    assert not manual.engine.active
    assert len(manual.state.generations) == 1
    running.readable.set()
    assert (await running.finish()).body.endswith(b"data: [DONE]\n\n")
    assert not manual.state.generations


async def test_so_many_may_run(tokenizer: Tokenizer) -> None:
    service = make_manual(tokenizer, max_recorded_streams=2)
    first, _second = (begin(service, stream_id=f"{at}") for at in range(2))
    await service.engine.until_added(2)
    reply = await begin(service, stream_id="2").finish()
    assert (reply.status, reply.error["code"]) == (429, "too_many_streams")
    assert "retry-after" in reply.headers
    await drive(service, first)
    third = begin(service, stream_id="2")
    await settle()
    assert (await drive(service, third)).endswith(b"data: [DONE]\n\n")


async def test_one_key_takes_a_quarter_of_those_that_may_run(tokenizer: Tokenizer) -> None:
    service = make_manual(tokenizer, max_recorded_streams=8, api_keys=("one", "two"))
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))

    def ask(stream_id: str, key: dict[str, str]) -> Exchange:
        return exchange(service.app, PATH, {**BODY, "stream": True}, x_stream_id=stream_id, **key)

    mine = [ask(f"{at}", one) for at in range(2)]
    await service.engine.until_added(2)
    refused = await ask("more", one).finish()
    assert (refused.status, refused.error["code"]) == (429, "too_many_streams")
    assert "2 streams of this key" in refused.error["message"]
    theirs = ask("theirs", two)
    plain = exchange(service.app, PATH, BODY, **one)
    await service.engine.until_added(5)
    for running in (*mine, theirs, plain):
        await drive(service, running)
    assert (await drive(service, ask("again", one))).endswith(b"data: [DONE]\n\n")


async def test_one_keys_streams_do_not_push_out_anothers(make_service: Callable[..., Service]) -> None:
    """Of those that have ended."""
    service = make_service(max_recorded_bytes=40_000, api_keys=("one", "two"))
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    body = {**BODY, "stream": True}
    whole = (await post(service.app, PATH, body, x_stream_id="s", **two)).body
    for at in range(30):
        assert (await post(service.app, PATH, body, x_stream_id=f"{at}", **one)).status == 200
    assert (await resume(service, **two).finish()).body == whole
    assert (await resume(service, stream_id="0", **one).finish()).status == 404
    assert (await resume(service, stream_id="29", **one).finish()).status == 200


async def test_the_oldest_that_have_ended_are_forgotten(make_service: Callable[..., Service]) -> None:
    """No more of them than must be, and none that is being read."""
    service = make_service(max_recorded_bytes=40_000)
    size = len((await begin(service, stream_id="0").finish()).body) + 4096
    read = resume(service, stream_id="0")
    read.readable.clear()
    await settle()
    for at in range(1, 12):
        await begin(service, stream_id=f"{at}").finish()
    statuses = [(await resume(service, "99", f"{at}").finish()).status for at in range(1, 12)]
    kept = 40_000 // size - 1
    assert statuses == [404] * (11 - kept) + [400] * kept  # which have no such event
    assert (await resume(service, "99", "0").finish()).status == 400
    read.readable.set()
    assert (await read.finish()).body.endswith(b"data: [DONE]\n\n")


async def test_a_stream_outlives_an_earlier_one_of_its_id(make_service: Callable[..., Service]) -> None:
    service = make_service(max_recorded_bytes=1)
    await begin(service, stream_id="a").finish()
    earlier = service.state.recordings.find("", "a")
    await begin(service, stream_id="b").finish()  # for which it is forgotten
    again = (await begin(service, stream_id="a").finish()).body
    earlier._give_up()  # its time is up
    assert (await resume(service, stream_id="a").finish()).body == again


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 300)), min_size=1, max_size=60), st.data())
def test_ring(events: list[tuple[int, int]], data: st.DataObject) -> None:
    """The latest events are there, as many as are allowed; any id whose successors are all there is good."""
    ring, tokens, ids = EventRing(2000), 0, []
    all_events: list[bytes] = []
    for more, size in events:
        tokens += more
        ring.add(tokens, b"x" * size + b"\n\n")
        (latest,) = ring.since(len(all_events)) or []
        all_events.append(latest)
        ids.append(EventId.parse(latest.split(b"\n")[0].removeprefix(b"id: ").decode()))
    assert ids == sorted(set(ids))
    first = next(number for number in range(len(ids)) if ring.since(number) is not None)
    kept = ring.since(first)
    assert kept == all_events[first:]
    assert ring.bytes == sum(map(len, kept)) <= max(2000, sum(map(len, kept[-MIN_EVENTS:])))
    assert first == 0 or sum(map(len, all_events[first - 1 :])) > 2000
    at = data.draw(st.integers(-1, len(ids) - 1))
    if at + 1 >= first:
        assert ring.number_after(ids[at] if at >= 0 else None) == at + 1
    else:
        with pytest.raises(ApiError) as forgotten:
            ring.number_after(ids[at] if at >= 0 else None)
        assert forgotten.value.status == 410


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="key", max_retries=0) as client:
        yield client


def test_real_clients(live: Live, client: openai.OpenAI) -> None:
    """The openai client starts a stream and loses it; httpx picks it up, as curl would."""
    header = {"X-Stream-Id": "mine"}
    messages: Any = MESSAGES
    text = ""
    with client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=200, stream=True, extra_headers=header
    ) as stream:
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if len(text) > 20:
                break
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=200)
    url, headers = f"{live.url}/v1/streams/mine", {"Authorization": "Bearer key"}
    events = events_of(httpx.get(url, headers=headers).content)
    assert text_of(events) == {0: whole.choices[0].message.content}
    rest = httpx.get(url, headers={**headers, "Last-Event-ID": events[50][0]})
    assert events_of(rest.content) == events[51:]
    assert rest.headers["content-type"].startswith("text/event-stream")
