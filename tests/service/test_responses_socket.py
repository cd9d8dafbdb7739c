"""WS /v1/responses in the loop of the test: every response ends once, whatever happens in which order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter

from quire.service.answer.conversations import ConversationMemory, Conversations
from quire.service.answer.history import History
from quire.service.api.responses.protocol import ResponseCreate
from quire.service.errors import not_ready
from quire.service.text.tokenizer import Tokenizer
from quire.service.watchdog import DEFAULT_TIMEOUT_ON_CPU
from tests.service.asgi import get, post, settle
from tests.service.asgi_socket import Socket
from tests.service.conftest import Service
from tests.service.socket_life import SocketLife, lives
from tests.service.test_responses import said

pytestmark = pytest.mark.anyio
EVENT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
ENDS = {f"response.{status}" for status in ("completed", "incomplete", "failed", "cancelled")}


def step(service: Service, count: int = 1) -> None:
    for _ in range(count):
        service.engine.step()


def of(events: list[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    return [event for event in events if event.get("response_id") == response_id and event["type"] != "error"]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event.get("delta", "") for event in events)


def without(value: Any, *names: str) -> Any:
    """Nested, without what differs from one response to the next."""
    if isinstance(value, dict):
        return {name: without(item, *names) for name, item in value.items() if name not in names}
    return [without(item, *names) for item in value] if isinstance(value, list) else value


@pytest.fixture
async def manual(make_service: Callable[..., Service]) -> Service:
    """Nothing moves until the test says so."""
    return make_service(auto=False)


async def test_the_same_events_as_over_http(manual: Service) -> None:
    """To the byte, but for ids, times and where it is kept, when both read as fast as the tokens come."""
    body: dict[str, Any] = {"input": "hello", "max_output_tokens": 9, "instructions": "be kind", "seed": 1}
    body |= {"metadata": {"a": "b"}, "temperature": 0.5, "store": False}
    socket = Socket(manual.app).start()
    socket.say({"type": "response.create", **body})
    streamed = asyncio.create_task(post(manual.app, "/v1/responses", {**body, "stream": True}))
    await manual.engine.until_added(2)
    for _ in range(9):
        step(manual)
        await settle()
    await socket.until_type("response.incomplete")
    named = (await streamed).body.decode().removesuffix("\n\n").split("\n\n")
    over_http = [EVENT.validate_json(event.split("\ndata: ")[1]).model_dump() for event in named]
    over_socket = [EVENT.validate_python(event, strict=True).model_dump() for event in socket.events]
    names = ("id", "item_id", "response_id", "created_at", "stream_id")
    assert without(over_socket, *names) == without(over_http, *names)
    assert len([event for event in over_socket if "delta" in event]) > 5
    socket.leave()


async def test_several_at_once_and_their_stream_ids(manual: Service, tokenizer: Tokenizer) -> None:
    socket = Socket(manual.app).start()
    for at in range(4):
        socket.create(f"{at}", stream_id=f"lane {at}", max_output_tokens=6)
    created = [await socket.until_type("response.created", at + 1) for at in range(4)]
    for _ in range(6):
        step(manual)
        await settle()
    await socket.until_type("response.incomplete", 4)
    assert {event["stream_id"] for event in created} == {f"lane {at}" for at in range(4)}
    for event in created:
        events = of(socket.events, event["response"]["id"])
        at = event["stream_id"].removeprefix("lane ")
        assert {event["stream_id"] for event in events} == {f"lane {at}"}
        assert text_of(events) == said(tokenizer, f"<|user|>{at}<|assistant|>", 6)
    assert len({event["response"]["id"] for event in created}) == 4
    socket.leave()


async def test_one_of_a_stream_id_after_another(manual: Service) -> None:
    socket = Socket(manual.app).start()
    for text in "abc":
        socket.create(text, stream_id="s", max_output_tokens=1)
    socket.create("d", max_output_tokens=1)
    await socket.until_type("response.created", 2)
    await settle()
    assert len(manual.engine.streams) == 2  # "a", and "d", which waits for nobody
    for count in (3, 4):
        step(manual)
        await manual.engine.until_added(count)
    step(manual)
    await socket.until_type("response.incomplete", 4)
    order = [event["response"]["id"] for event in socket.events if event["type"] in ENDS]
    lane = [event["response"]["id"] for event in socket.events if event["type"] == "response.created"]
    assert [each for each in order if each != lane[1]] == [lane[0], *lane[2:]]
    socket.leave()


async def test_conversation(service: Service, tokenizer: Tokenizer) -> None:
    socket = Socket(service.app).start()
    socket.create("a", instructions="i", max_output_tokens=3)
    first = await socket.until_type("response.incomplete")
    socket.create("b", previous_response_id=first["response"]["id"], max_output_tokens=2)
    second = await socket.until_type("response.incomplete", 2)
    assert second["response"]["previous_response_id"] == first["response"]["id"]
    socket.create("c", previous_response_id=second["response"]["id"], max_output_tokens=1)
    socket.create("d", previous_response_id=first["response"]["id"], max_output_tokens=1)  # a fork
    await socket.until_type("response.incomplete", 4)
    one, two = (event["response"]["output"][0]["content"][0]["text"] for event in (first, second))
    history = f"<|user|>a<|assistant|>{one}<|user|>"
    prompts = [f"{history}b", f"{history}b<|assistant|>{two}<|user|>c", f"{history}d"]
    assert [stream.prompt for stream in service.engine.streams[1:]] == [
        tokenizer.encode(f"{prompt}<|assistant|>", add_special_tokens=False) for prompt in prompts
    ]
    socket.leave()


async def test_going_on_from_one_that_runs_waits_for_it(manual: Service) -> None:
    socket = Socket(manual.app).start()
    socket.create("a", max_output_tokens=2)
    first = (await socket.until_type("response.created"))["response"]["id"]
    socket.create("b", previous_response_id=first, max_output_tokens=1)
    await settle()
    assert len(manual.engine.streams) == 1
    step(manual, 2)
    await manual.engine.until_added(2)
    step(manual)
    await socket.until_type("response.incomplete", 2)
    socket.leave()


async def test_cancelled_ones_can_be_gone_on_from(manual: Service, tokenizer: Tokenizer) -> None:
    socket = Socket(manual.app).start()
    socket.create("a")
    first = (await socket.until_type("response.created"))["response"]["id"]
    step(manual, 2)
    await socket.until_type("response.output_text.delta")
    socket.cancel(first)
    socket.cancel(first)  # impatience is no error, or says that it is over
    last = (await socket.until_type("response.cancelled"))["response"]
    assert last["status"] == "cancelled"
    assert last["output"][0]["status"] == "incomplete"
    assert manual.engine.streams[0].aborted
    socket.create("b", previous_response_id=first, max_output_tokens=1)
    await manual.engine.until_added(2)
    prompt = f"<|user|>a<|assistant|>{last['output'][0]['content'][0]['text']}<|user|>b<|assistant|>"
    assert manual.engine.streams[1].prompt == tokenizer.encode(prompt, add_special_tokens=False)
    socket.leave()


async def test_conversations_belong_to_their_socket(service: Service) -> None:
    one, other = Socket(service.app).start(), Socket(service.app).start()
    one.create(max_output_tokens=1)
    response = (await one.until_type("response.incomplete"))["response"]["id"]
    other.create(previous_response_id=response)
    error = await other.until_type("error")
    assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
    assert error["error"]["param"] == "previous_response_id"
    one.leave()
    other.leave()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400), st.booleans()), max_size=40))
def test_conversations_are_bounded(uses: list[tuple[int, int, bool]]) -> None:
    """The latest is there; others only while all together are within the limit; what is there is right."""
    kept, held = Conversations(5000, ConversationMemory(1 << 20), ""), dict[str, History]()
    expected: list[tuple[str, int]] = []  # the longest unused first
    for number, (other, size, look) in enumerate(uses):
        name = f"{other if look else number}"
        if look and name not in {name for name, _ in expected}:
            assert name not in kept
            continue
        if not look:
            held[name] = History([{"role": "user", "content": "x" * size}])
            kept.keep(name, held[name])
            expected.append((name, len('[{"role":"user","content":""}]') + size + 1024))
        assert kept.find(name) is held[name]
        expected.sort(key=lambda each: each[0] == name)
        while len(expected) > 1 and sum(size for _, size in expected) > 5000:
            del expected[0]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1500)), max_size=60))
def test_conversations_of_all_are_bounded_and_nobody_pushes_others_out(
    uses: list[tuple[int, int, int]],
) -> None:
    """Whoever has less than an equal share of the bound keeps all of it, whatever the others do."""
    memory = ConversationMemory(16_000)
    sockets = {(key, at): Conversations(9000, memory, f"{key}") for key in range(4) for at in range(4)}
    said: dict[int, dict[tuple[int, str], int]] = {key: {} for key in range(4)}
    for number, (key, at, size) in enumerate(uses):
        sockets[key, at].keep(f"{number}", History([{"role": "user", "content": "x" * size}]))
        said[key][at, f"{number}"] = len('[{"role":"user","content":""}]') + size + 1024
        assert memory.bytes <= 16_000
        for other, sizes in said.items():
            if sum(sizes.values()) <= 16_000 // 4:
                for socket, name in sizes:
                    assert sockets[other, socket].find(name)
    for socket in sockets.values():
        socket.close()
    assert memory.bytes == 0


async def test_a_socket_that_closes_leaves_no_conversation(service: Service) -> None:
    for _ in range(3):
        socket = Socket(service.app).start()
        socket.create(max_output_tokens=1)
        await socket.until_type("response.incomplete")
        assert service.state.conversations.bytes > 1024
        socket.leave()
        assert socket.task is not None
        await socket.task
    assert service.state.conversations.bytes == 0


async def test_one_keys_sockets_cannot_forget_anothers(make_service: Callable[..., Service]) -> None:
    service = make_service(api_keys=("one", "two"), max_conversations_bytes=20_000)
    quiet = Socket(service.app, authorization="Bearer two").start()
    quiet.create(max_output_tokens=1)
    mine = (await quiet.until_type("response.incomplete"))["response"]["id"]
    loud = [Socket(service.app, authorization="Bearer one").start() for _ in range(4)]
    for turn in range(1, 6):
        for socket in loud:
            socket.create("x" * 300, max_output_tokens=1)
            await socket.until_type("response.incomplete", turn)
            assert service.state.conversations.bytes <= 20_000
    quiet.create(previous_response_id=mine, max_output_tokens=1)
    second = await quiet.until_type("response.incomplete", 2)
    assert second["response"]["previous_response_id"] == mine
    loud[0].create(previous_response_id=loud[0].events[0]["response"]["id"], max_output_tokens=1)
    assert (await loud[0].until_type("error"))["error"]["code"] == "previous_response_not_found"
    for socket in (quiet, *loud):
        socket.leave()


REFUSED: list[tuple[Any, int, str, str | None]] = [
    ("{", 400, "invalid_json", None),
    ("[" * 200_000, 400, "invalid_value", None),
    ('{"type": "response.create", "input": ' + "[" * 200_000, 400, "invalid_value", "input[0]"),
    ('{"type": "response.create", "input": "\\ud800"}', 400, "invalid_json", None),
    (b"{}", 400, "binary_message", None),
    ({}, 400, "missing_field", "type"),
    ({"type": "response.steer", "previous_response_id": "x", "input": "a"}, 400, "invalid_value", "type"),
    ({"type": "response.create"}, 400, "missing_field", "input"),
    ({"type": "response.create", "input": "a", "n": 2}, 400, "unknown_field", "n"),
    ({"type": "response.create", "input": "a", "background": True}, 400, "invalid_value", "background"),
    ({"type": "response.create", "input": "a", "generate": False}, 400, "unknown_field", "generate"),
    ({"type": "response.create", "input": "a", "stream": False}, 400, "invalid_value", "stream"),
    ({"type": "response.create", "input": "a", "stream_id": ""}, 400, "invalid_value", "stream_id"),
    ({"type": "response.create", "input": "a", "model": "other"}, 404, "model_not_found", "model"),
    ({"type": "response.create", "input": "a" * 3000}, 400, "context_length_exceeded", "input"),
    ({"type": "response.cancel"}, 400, "missing_field", "response_id"),
    ({"type": "response.cancel", "response_id": "resp_1"}, 404, "response_not_found", "response_id"),
    ({"type": "response.cancel", "response_id": 5}, 400, "invalid_value", "response_id"),
]


async def test_the_first_event_names_the_fields_without_effect(make_service: Callable[..., Service]) -> None:
    """Those that the header of the same answer names over HTTP."""
    service = make_service(unknown_fields="ignore")
    fields: dict[str, Any] = {"user": "me", "nonsense": 1, "max_tool_calls": 3, "truncation": "disabled"}
    reply = await post(service.app, "/v1/responses", {"input": "a", "max_output_tokens": 1, **fields})
    socket = Socket(service.app).start()
    socket.create("a", max_output_tokens=1, **fields)
    socket.create("b", max_output_tokens=1)
    await socket.until_type("response.incomplete", 2)
    told = [event.get("ignored") for event in socket.events if event["type"] == "response.created"]
    assert told == [reply.headers["x-quire-ignored"].split(", "), None] and told[0]
    assert sum("ignored" in event for event in socket.events) == 1
    socket.leave()


async def test_a_limit_of_0_calls_is_named_like_any_other(service: Service) -> None:
    reply = await post(service.app, "/v1/responses", {"input": "a", "max_tool_calls": 0})
    assert reply.headers["x-quire-ignored"] == "max_tool_calls"


async def test_refusals_leave_the_socket_open(service: Service) -> None:
    socket = Socket(service.app).start()
    for count, (message, status, code, param) in enumerate(REFUSED, 1):
        socket.say(message)
        event = await socket.until_type("error", count)
        error = event["error"]
        assert (event["status"], error["code"], error["param"]) == (status, code, param), message
        assert {"message", "type", "param", "code"} <= set(error)
    socket.create(max_output_tokens=1)
    await socket.until_type("response.incomplete")
    assert len(service.engine.streams) == 1
    socket.leave()


async def test_a_refusal_names_what_can_be_read(service: Service) -> None:
    """By which a client, and a router, know what of all that was asked for it is."""
    socket = Socket(service.app).start()
    create, cancel = {"type": "response.create", "input": "a"}, {"type": "response.cancel"}
    for count, (message, named) in enumerate(
        [
            ({**create, "stream_id": "s", "n": 2}, ("s", None)),
            ({**create, "stream_id": "s", "model": "other"}, ("s", None)),
            ({**create, "type": "response.steer", "stream_id": "s"}, ("s", None)),
            ({**create, "stream_id": "s" * 257}, (None, None)),
            ({**create, "stream_id": 5}, (None, None)),
            ({**create, "n": 2}, (None, None)),
            ('{"stream_id": "s"', (None, None)),
            ({**cancel, "response_id": "r", "stream_id": "s"}, (None, "r")),
            ({**cancel, "response_id": 5, "stream_id": "s"}, ("s", None)),
        ],
        1,
    ):
        socket.say(message)
        error = await socket.until_type("error", count)
        assert (error.get("stream_id"), error.get("response_id")) == named, message
    socket.leave()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=8), values, max_size=4),
    max_leaves=8,
)
FIELDS = st.dictionaries(st.sampled_from([*ResponseCreate.__struct_fields__, "type"]), JSON, max_size=3)
MESSAGES = st.one_of(
    st.text(),
    st.binary(),
    JSON.map(json.dumps),
    FIELDS.map(lambda fields: json.dumps({"type": "response.create", "input": "a", **fields})),
    FIELDS.map(lambda fields: json.dumps({"type": "response.cancel", "response_id": "a", **fields})),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(MESSAGES, max_size=12))
def test_whatever_is_said_is_answered_once(tokenizer: Tokenizer, messages: list[str | bytes]) -> None:
    async def live() -> None:
        life = Life(tokenizer)
        for count, message in enumerate(messages, 1):
            life.socket.say(message)
            answers: list[dict[str, Any]] = []
            while len(answers) < count:
                life.engine.step()
                await asyncio.sleep(0)
                events = life.socket.events
                answers = [each for each in events if each["type"] in ("error", "response.created")]
            assert len(answers) == count
            assert answers[-1]["type"] == "response.created" or 400 <= answers[-1]["status"] < 500
        await life.finish()
        assert life.socket.close_code is None
        life.socket.leave()

    asyncio.run(live())


async def test_cancelling_what_has_ended_or_is_another_sockets(manual: Service) -> None:
    one, other = Socket(manual.app).start(), Socket(manual.app).start()
    one.create(max_output_tokens=1)
    response = (await one.until_type("response.created"))["response"]["id"]
    other.cancel(response)
    error = await other.until_type("error")
    assert (error["error"]["code"], error["response_id"]) == ("response_not_found", response)
    step(manual)
    await one.until_type("response.incomplete")
    one.cancel(response)
    await one.until_type("error")
    assert len([event for event in one.events if event["type"] in ENDS]) == 1
    one.leave()
    other.leave()


async def test_a_cancellation_that_meets_the_end(manual: Service) -> None:
    """It is kept as it was told."""
    socket = Socket(manual.app).start()
    socket.create("a", max_output_tokens=1, store=True)
    response = (await socket.until_type("response.created"))["response"]["id"]
    step(manual)
    socket.cancel(response)
    told = (await socket.until(lambda events: events[-1]["type"] in ENDS))[-1]
    kept = await get(manual.app, f"/v1/responses/{response}")
    assert json.loads(kept.body) == told["response"]
    socket.leave()


async def test_sixteen_at_once(manual: Service) -> None:
    socket = Socket(manual.app).start()
    for at in range(18):
        socket.create(max_output_tokens=2, stream_id=f"{at}")
    for count, stream_id in ((1, "16"), (2, "17")):
        error = await socket.until_type("error", count)
        assert (error["error"]["code"], error["stream_id"]) == ("too_many_responses", stream_id)
    await socket.until_type("response.created", 16)
    step(manual, 2)
    await socket.until_type("response.incomplete")
    socket.create(max_output_tokens=2)  # as soon as one is known to have ended
    await socket.until_type("response.created", 17)
    socket.leave()


async def test_a_full_queue_is_refused_with_its_retry_after(make_service: Callable[..., Service]) -> None:
    service = make_service(auto=False, max_num_queued_reqs=1)
    socket = Socket(service.app).start()
    socket.create()
    await socket.until_type("response.created")
    socket.create(stream_id="s")
    error = await socket.until_type("error")
    assert (error["status"], error["error"]["code"], error["stream_id"]) == (429, "queue_full", "s")
    assert int(error["error"]["headers"]["retry-after"]) > 0
    socket.leave()


async def test_a_socket_that_closes_aborts_all(manual: Service) -> None:
    socket = Socket(manual.app).start()
    for _ in range(5):
        socket.create()
    await socket.until_type("response.created", 5)
    step(manual)
    socket.leave()
    assert socket.task is not None
    await socket.task
    assert all(stream.aborted for stream in manual.engine.streams)
    assert not manual.state.generations and not manual.state.streams
    assert manual.state.queue.prompts == 0


async def test_a_stalled_reader_is_cut(make_service: Callable[..., Service]) -> None:
    service = make_service(auto=False, send_timeout=0.05)
    socket = Socket(service.app).start()
    socket.create()
    await socket.until_type("response.created")
    socket.readable.clear()
    step(service, 3)
    assert socket.task is not None
    await socket.task
    assert socket.left
    assert service.engine.streams[0].aborted


async def test_what_waits_for_a_reader_is_limited(make_service: Callable[..., Service]) -> None:
    """In all responses of a socket together, refusals included; the others' go on."""
    service = make_service(auto=False, max_backlog_bytes=2000)
    silent, noisy, quiet = (Socket(service.app).start() for _ in range(3))
    for socket in (silent, quiet):
        for _ in range(3):
            socket.create(ignore_eos=True, max_output_tokens=200)
        await socket.until_type("response.created", 3)
    silent.readable.clear()
    noisy.readable.clear()
    for _ in range(20):
        noisy.cancel("x" * 200)
    for _ in range(200):
        step(service)
        await settle()
    for socket in (silent, noisy):
        assert socket.left and socket.task is not None
        await socket.task
    assert [stream.aborted for stream in service.engine.streams] == [True] * 3 + [False] * 3
    await quiet.until_type("response.incomplete", 3)
    quiet.leave()


async def test_a_slow_reader_gets_merged_deltas(manual: Service, tokenizer: Tokenizer) -> None:
    socket = Socket(manual.app).start()
    socket.create(max_output_tokens=30)
    await socket.until_type("response.created")
    socket.readable.clear()
    for _ in range(30):
        step(manual)
        await settle()
    socket.readable.set()
    await socket.until_type("response.incomplete")
    assert text_of(socket.events) == said(tokenizer, "<|user|>hello<|assistant|>", 30)
    assert len([event for event in socket.events if "delta" in event]) <= 2
    socket.leave()


async def test_an_end_that_comes_while_nothing_can_be_sent(manual: Service) -> None:
    """Before its first event is out, or in the middle of them."""
    socket = Socket(manual.app).start()
    await settle()
    for at in range(1, 3):
        if at == 1:
            socket.readable.clear()
            socket.cancel("x")  # whose refusal is held up
            await settle()
        socket.create(max_output_tokens=4)
        await manual.engine.until_added(at)
        if at == 2:
            response = (await socket.until_type("response.created", 2))["response"]["id"]
            socket.readable.clear()
        for _ in range(4):
            step(manual)
            await settle()
        if at == 2:
            socket.cancel(response)  # too late
            await settle()
        assert len(manual.state.generations) == 1  # a drain would wait for what is unsent
        socket.readable.set()
        last = await socket.until_type("response.incomplete", at)
        own = of(socket.events, last["response"]["id"])
        assert [event["sequence_number"] for event in own] == list(range(len(own)))
        assert text_of(own) == last["response"]["output"][0]["content"][0]["text"]
        await settle()
        assert not manual.state.generations
    assert (await socket.until_type("error", 2))["response_id"] == response
    socket.leave()


async def test_the_engines_death_fails_each_once(manual: Service) -> None:
    socket = Socket(manual.app).start()
    socket.create()
    socket.create()
    await socket.until_type("response.created", 2)
    manual.engine.die("CUDA error")
    await socket.until_type("response.failed", 2)
    for event in socket.events:
        if event["type"] == "response.failed":
            assert "CUDA error" in event["response"]["error"]["message"]
    socket.create()
    assert (await socket.until_type("error"))["status"] == 503
    socket.leave()


async def test_shutdown_lets_what_runs_end_then_closes(manual: Service) -> None:
    idle, busy = Socket(manual.app).start(), Socket(manual.app).start()
    busy.create(max_output_tokens=2)
    await busy.until_type("response.created")
    manual.state.draining = True
    for stream in list(manual.state.streams):
        stream.interrupt(not_ready("the server is shutting down"))
    assert idle.task is not None and busy.task is not None
    await idle.task
    assert idle.close_code == 1001
    busy.create()
    assert (await busy.until_type("error"))["error"]["code"] == "not_ready"
    assert busy.close_code is None
    step(manual, 2)
    await busy.task
    assert [event["type"] for event in busy.events if event["type"] in ENDS] == ["response.incomplete"]
    assert busy.close_code == 1001


async def test_before_the_engine_is_up_the_handshake_is_refused(make_service: Callable[..., Service]) -> None:
    service = make_service(ready=False)
    socket = Socket(service.app).start()
    assert socket.task is not None
    await socket.task
    assert socket.sent[0]["type"] == "websocket.http.response.start"
    assert socket.sent[0]["status"] == 503


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("http://localhost:8000", "localhost:8000", None),
        ("http://LOCALHOST:8000", "localhost:8000", None),
        ("http://localhost", "localhost:80", None),
        ("https://localhost:443", "localhost", None),
        ("http://localhost:8001", "localhost:8000", 403),
        ("http://evil.example", "localhost:8000", 403),
        ("http://localhost:8000.evil.example", "localhost:8000", 403),
        ("https://localhost:80", "localhost", 403),
        ("null", "localhost", 403),
        ("file://", "localhost", 403),
        ("", "localhost", 403),
    ],
)
async def test_origin(service: Service, origin: str, host: str, status: int | None) -> None:
    socket = Socket(service.app, origin=origin, host=host).start()
    await settle()
    assert socket.sent[0].get("status") == status
    socket.leave()


class Life(SocketLife):
    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, "/v1/responses")
        self.creates = 0

    def ids(self) -> list[str]:
        return [
            event["response"]["id"] for event in self.socket.events if event["type"] == "response.created"
        ]

    async def act(self, action: tuple[Any, ...]) -> None:
        match action:
            case ("create", count, lane, previous):
                ids = self.ids()
                given = {"previous_response_id": ids[previous % len(ids)]} if ids and previous else {}
                self.socket.create("ab", max_output_tokens=count, ignore_eos=True, **lane, **given)
                self.creates += 1
            case ("cancel", which):
                ids = self.ids()
                self.socket.cancel(ids[which % len(ids)] if ids else "resp_0")
            case ("stick", seconds):
                self.engine.stalled = seconds
                self.state.watchdog.look(self.engine)
            case _:
                await super().act(action)

    def check(self) -> None:
        events = self.socket.events
        for response in self.ids():
            own = of(events, response)
            kinds = [event["type"] for event in own]
            assert [event["sequence_number"] for event in own] == list(range(len(own)))
            assert kinds[:2] == ["response.created", "response.in_progress"]
            ends = [kind for kind in kinds if kind in ENDS]
            if not self.socket.left:
                assert ends == [kinds[-1]]
            assert len(ends) <= 1
            if ends and own[-1]["response"]["output"]:
                assert text_of(own) == own[-1]["response"]["output"][0]["content"][0]["text"]
        if not self.socket.left:
            refused = [event for event in events if event["type"] == "error" and "response_id" not in event]
            if not self.draining:  # after which nothing may be heard any more
                assert len(self.ids()) + len(refused) == self.creates
        super().check()


ACTIONS = st.one_of(
    st.tuples(
        st.just("create"),
        st.integers(1, 6),
        st.sampled_from([{}, {}, {"stream_id": "s"}, {"stream_id": "t"}]),
        st.integers(0, 3),
    ),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("wait"), st.integers(1, 12)),
    st.tuples(st.sampled_from(["stall", "read", "interrupt"])),
    st.tuples(st.just("stick"), st.sampled_from([0.0, DEFAULT_TIMEOUT_ON_CPU + 1])),
)


@settings(max_examples=120, deadline=None)
@given(lives(ACTIONS, 30))
def test_every_response_ends_exactly_once(tokenizer: Tokenizer, life: tuple[list[Any], Any]) -> None:
    async def live() -> None:
        await Life(tokenizer).live(*life)

    asyncio.run(live())
