"""WS /v1/completions and /v1/chat/completions: what one would POST, in frames; each ends exactly once."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from quire.service.errors import not_ready
from quire.service.text.tokenizer import Tokenizer
from tests.service.asgi import post, settle
from tests.service.asgi_socket import Socket
from tests.service.conftest import Service
from tests.service.socket_life import SocketLife, lives

pytestmark = pytest.mark.anyio
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Make = Callable[..., Service]


def opened(service: Service, path: str = COMPLETIONS, **headers: str) -> Socket:
    return Socket(service.app, path, **headers).start()


def ends(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [frame for frame in frames if "done" in frame or "error" in frame]


async def until_ended(socket: Socket, count: int = 1) -> list[dict[str, Any]]:
    """Return the terminal frames, once there are so many."""
    await socket.until(lambda frames: len(ends(frames)) >= count)
    return ends(socket.events)


def text_of(frames: list[dict[str, Any]], tag: str | None = None) -> str:
    own = [frame for frame in frames if frame.get("tag") == tag and "choices" in frame]
    return "".join(choice["text"] for frame in own for choice in frame["choices"])


def without_id(text: str) -> str:
    return re.sub(r'"id":"[^"]*","(object":"[^"]*",")?created":\d+', "", text)


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    asked = {"prompt": "abc"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "abc"}]}
    return {**asked, "max_tokens": 4, **fields}


@pytest.fixture
async def manual(make_service: Make) -> Service:
    """Nothing moves until the test says so."""
    return make_service(auto=False)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_frames_are_the_chunks_of_an_event_stream_and_then_done(manual: Service, path: str) -> None:
    body = body_of(path, n=2, stream_options={"include_usage": True})
    socket = opened(manual, path)
    socket.say({**body, "tag": "t"})
    streamed = asyncio.create_task(post(manual.app, path, {**body, "stream": True}))
    await manual.engine.until_added(2)
    for _ in range(4):
        manual.engine.step()
        await settle()
    await until_ended(socket)
    events = (await streamed).body.decode().removesuffix("\n\n").split("\n\n")
    expected = [event.removeprefix("data: ").replace("{", '{"tag":"t",', 1) for event in events]
    assert expected.pop() == "[DONE]"
    texts = [message["text"] for message in socket.sent if message["type"] == "websocket.send"]
    assert texts.pop() == '{"tag":"t","done":true}'
    assert [without_id(text) for text in texts] == [without_id(event) for event in expected]
    socket.leave()


FIELDS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"n": 2, "seed": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1}),
    (COMPLETIONS, {"n": 2, "best_of": 3, "use_beam_search": True, "length_penalty": 0.5}),
    (COMPLETIONS, {"prompt": ["ab", "cd"], "echo": True, "logprobs": 1}),
    (COMPLETIONS, {"prompt": [5, 6, 7], "stop_token_ids": [6], "return_token_ids": True}),
    (COMPLETIONS, {"guided_regex": "[a-z]+", "prompt_logprobs": 1}),
    (CHAT, {"stop": ["b"], "presence_penalty": 1, "repetition_penalty": 1.1, "logit_bias": {"5": 1}}),
    (CHAT, {"logprobs": True, "top_logprobs": 2, "cache_salt": "a", "best_of": 2}),
    (CHAT, {"response_format": {"type": "json_object"}, "max_completion_tokens": 4}),
]


@pytest.mark.parametrize(("path", "fields"), FIELDS)
async def test_a_whole_answer_is_what_a_post_gets(service: Service, path: str, fields: Any) -> None:
    """With all that a request may say, as it reaches the engine."""
    body = body_of(path) | fields
    posted = await post(service.app, path, body)
    socket = opened(service, path)
    socket.say({**body, "stream": False})
    await until_ended(socket)
    reply, done = (message["text"] for message in socket.sent[1:])
    assert (posted.status, done) == (200, '{"done":true}')
    assert without_id(reply) == without_id(posted.body.decode())
    asked = [
        (stream.prompt, structs.replace(stream.params, seed=0), stream.cache_salt)
        for stream in service.engine.streams
    ]
    assert asked[: len(asked) // 2] == asked[len(asked) // 2 :]
    socket.leave()


async def test_tags_tell_several_at_once_apart(manual: Service) -> None:
    socket = opened(manual)
    for tag in ("a", "bc", ""):
        socket.say({"prompt": tag or "d", "max_tokens": 2, "tag": tag})
    await manual.engine.until_added(3)
    for _ in range(2):
        manual.engine.step()
        await settle()
    assert await until_ended(socket, 3) == [{"tag": tag, "done": True} for tag in ("a", "bc", "")]
    assert [text_of(socket.events, tag) for tag in ("a", "bc", "")] == ["aa", "bc", "dd"]
    socket.leave()


async def test_frames_without_a_tag_are_answered_one_after_another(manual: Service) -> None:
    """So that what is refused among them is told apart, too."""
    socket = opened(manual)
    for message in ({"prompt": "a", "max_tokens": 1}, "{", {"prompt": "b", "max_tokens": 1}):
        socket.say(message)
    await manual.engine.until_added(1)
    await settle()
    assert (len(manual.engine.streams), socket.events) == (1, [])
    manual.engine.step()
    await manual.engine.until_added(2)
    manual.engine.step()
    first, refused, last = await until_ended(socket, 3)
    assert (first, refused["error"]["code"], last) == ({"done": True}, "invalid_json", {"done": True})
    assert text_of(socket.events) == "ab"
    socket.leave()


async def test_a_cancelled_answer_says_so_and_its_request_is_aborted(manual: Service) -> None:
    socket = opened(manual)
    socket.say({"prompt": "a", "max_tokens": 9, "tag": "a"})
    await manual.engine.until_added(1)
    manual.engine.step()
    await socket.until(lambda frames: text_of(frames, "a") == "a")
    socket.say({"cancel": "a"})
    assert await until_ended(socket) == [{"tag": "a", "done": True, "cancelled": True}]
    assert manual.engine.streams[0].aborted
    socket.say({"prompt": "b", "max_tokens": 1, "tag": "a"})  # which is free again
    await manual.engine.until_added(2)
    manual.engine.step()
    assert (await until_ended(socket, 2))[1] == {"tag": "a", "done": True}
    socket.say({"cancel": "a"})
    unknown = (await until_ended(socket, 3))[2]
    assert (unknown["error"]["code"], unknown["error"]["param"]) == ("unknown_tag", "cancel")
    socket.leave()


async def test_what_is_cancelled_before_it_has_begun_is_not_made(manual: Service) -> None:
    socket = opened(manual)
    socket.say({"prompt": "a", "max_tokens": 9, "tag": "a"})
    socket.say({"cancel": "a"})  # read in the same turn of the loop
    assert await until_ended(socket) == [{"tag": "a", "done": True, "cancelled": True}]
    assert manual.engine.streams == []
    socket.leave()


async def test_a_tag_in_use_is_refused_and_its_answer_goes_on(manual: Service) -> None:
    socket = opened(manual)
    for _ in range(2):
        socket.say({"prompt": "a", "max_tokens": 1, "tag": "a"})
    (refused,) = await until_ended(socket)
    assert refused["error"]["code"] == "tag_in_use"
    assert "tag" not in refused  # it is not that answer's end
    await manual.engine.until_added(1)
    manual.engine.step()
    assert (await until_ended(socket, 2))[1] == {"tag": "a", "done": True}
    socket.leave()


REFUSED: list[tuple[Any, str, str | None]] = [
    ("{", "invalid_json", None),
    ("[]", "invalid_value", None),
    ("[" * 200_000, "invalid_value", None),
    ('{"prompt": ' + "[" * 200_000, "invalid_json", None),
    (b"{}", "binary_message", None),
    ({}, "missing_field", "prompt"),
    ({"prompt": "a", "wrong": 1}, "unknown_field", "wrong"),
    ({"prompt": "a", "n": 0}, "invalid_value", "n"),
    ({"prompt": "a", "model": "other"}, "model_not_found", "model"),
    ({"prompt": "a" * 3000}, "context_length_exceeded", "prompt"),
    ({"prompt": "a", "stream": False, "stream_options": {}}, "invalid_value", "stream_options"),
    ({"prompt": "a", "best_of": 2}, "invalid_value", "best_of"),  # for it is streamed
    ({"prompt": "a", "tag": "x" * 65}, "invalid_value", "tag"),
    ({"prompt": "a", "tag": 5}, "invalid_value", "tag"),
    ({"cancel": 5}, "invalid_value", "cancel"),
    ({"cancel": "a", "prompt": "a"}, "unknown_field", "cancel"),
    ({"cancel": "nobody"}, "unknown_tag", "cancel"),
]


async def test_refusals_leave_the_socket_open(service: Service) -> None:
    """A bad request's error is its answer, and so it has the tag if there is one."""
    socket = opened(service)
    for count, (message, code, param) in enumerate(REFUSED, 1):
        tags = isinstance(message, dict) and not {"tag", "cancel"} & set(message)
        socket.say({**message, "tag": f"{count}"} if tags else message)
        frame = (await until_ended(socket, count))[-1]
        assert (frame["error"]["code"], frame["error"]["param"]) == (code, param), message
        assert frame.get("tag") == (f"{count}" if tags else None)
        assert set(frame["error"]) == {"message", "type", "param", "code"}
    socket.say(body_of(COMPLETIONS))
    assert (await until_ended(socket, len(REFUSED) + 1))[-1] == {"done": True}
    socket.leave()


@pytest.mark.parametrize("streamed", [True, False])
async def test_fields_without_effect_are_named_in_the_last_frame(make_service: Make, streamed: bool) -> None:
    """Over HTTP a header does that."""
    service = make_service(unknown_fields="ignore")
    socket = opened(service)
    for more in ({"user": "me", "nonsense": 1}, {}):
        socket.say(body_of(COMPLETIONS, stream=streamed, **more))
    assert await until_ended(socket, 2) == [{"done": True, "ignored": ["user", "nonsense"]}, {"done": True}]
    socket.leave()


async def test_a_full_queue_is_refused_with_its_retry_after(make_service: Make) -> None:
    service = make_service(auto=False, max_num_queued_reqs=1)
    socket = opened(service)
    for tag in "ab":
        socket.say(body_of(COMPLETIONS, tag=tag))
    (frame,) = await until_ended(socket)
    assert (frame["tag"], frame["error"]["code"]) == ("b", "queue_full")
    assert int(frame["error"]["headers"]["retry-after"]) > 0
    socket.leave()


async def test_sixteen_at_once(manual: Service) -> None:
    socket = opened(manual)
    for at in range(17):
        socket.say(body_of(COMPLETIONS, max_tokens=1, tag=f"{at}"))
    (frame,) = await until_ended(socket)
    assert (frame["tag"], frame["error"]["code"]) == ("16", "too_many_answers")
    await manual.engine.until_added(16)
    manual.engine.step()
    await until_ended(socket, 17)
    socket.leave()


async def test_a_socket_that_closes_aborts_all(manual: Service) -> None:
    socket = opened(manual)
    for tag in "abc":
        socket.say(body_of(COMPLETIONS, tag=tag, stream=tag != "b"))
    await manual.engine.until_added(3)
    manual.engine.step()
    socket.leave()
    assert socket.task is not None
    await socket.task
    assert all(stream.aborted for stream in manual.engine.streams)
    assert not manual.state.generations and not manual.state.streams
    assert manual.state.queue.prompts == 0


async def test_a_slow_reader_gets_merged_text_and_a_stalled_one_is_cut(make_service: Make) -> None:
    service = make_service(auto=False, send_timeout=0.05)
    slow, stalled = opened(service), opened(service)
    for socket in (slow, stalled):
        socket.say(body_of(COMPLETIONS, max_tokens=30))
    await service.engine.until_added(2)
    service.engine.step()
    for socket in (slow, stalled):
        await socket.until(len)
        socket.readable.clear()
    for _ in range(28):
        service.engine.step()
        await settle()
    slow.readable.set()
    assert stalled.task is not None
    await stalled.task
    assert stalled.left and service.engine.streams[1].aborted
    service.engine.step()
    await until_ended(slow)
    assert text_of(slow.events) == "abc" * 10
    assert len(slow.events) <= 5
    slow.leave()


async def test_shutdown_lets_what_runs_end_then_closes(manual: Service) -> None:
    idle, busy = opened(manual), opened(manual)
    busy.say(body_of(COMPLETIONS, max_tokens=1, tag="a"))
    await manual.engine.until_added(1)
    manual.state.draining = True
    for stream in list(manual.state.streams):
        stream.interrupt(not_ready("the server is shutting down"))
    assert idle.task is not None and busy.task is not None
    await idle.task
    assert idle.close_code == 1001
    busy.say(body_of(COMPLETIONS, tag="b"))
    (refused,) = await until_ended(busy)
    assert (refused["tag"], refused["error"]["code"]) == ("b", "not_ready")
    manual.engine.step()
    await busy.task
    assert ends(busy.events)[1:] == [{"tag": "a", "done": True}]
    assert busy.close_code == 1001


async def test_before_the_engine_is_up_the_handshake_is_refused(make_service: Make) -> None:
    socket = opened(make_service(ready=False))
    assert socket.task is not None
    await socket.task
    assert (socket.sent[0]["type"], socket.sent[0]["status"]) == ("websocket.http.response.start", 503)


KEY = "openai-insecure-api-key.secret"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses"])
@pytest.mark.parametrize(
    ("offered", "headers", "answer"),
    [
        ((KEY,), {}, KEY),
        ((KEY, "quire"), {}, "quire"),
        ((KEY, "other", "quire"), {}, "quire"),
        (("realtime", KEY), {}, "realtime"),
        ((), {"authorization": "Bearer secret"}, None),
        (("quire",), {"authorization": "Bearer secret"}, "quire"),
        (("quire",), {}, 401),
        (("openai-insecure-api-key.wrong", "quire"), {}, 401),
        (("openai-insecure-api-key.",), {}, 401),
        ((KEY,), {"authorization": "Bearer wrong"}, 401),
    ],
)
async def test_a_key_may_come_as_a_subprotocol(
    make_service: Make, path: str, offered: tuple[str, ...], headers: dict[str, str], answer: Any
) -> None:
    """Browsers can set no header of a WebSocket, and give up one that selects none of what they offer."""
    service = make_service(api_keys=("secret", "another"))
    socket = Socket(service.app, path, offered, **headers).start()
    await socket.until_true(lambda: socket.sent)
    opening = socket.sent[0]
    if answer == 401:
        assert opening["status"] == 401
    else:
        assert (opening["type"], opening["subprotocol"]) == ("websocket.accept", answer)
    socket.leave()


async def test_answers_of_different_keys_share_no_cache(make_service: Make) -> None:
    service = make_service(api_keys=("secret", "another"))
    sockets = [
        Socket(service.app, COMPLETIONS, (f"openai-insecure-api-key.{key}",)).start()
        for key in ("secret", "secret", "another")
    ]
    for socket in sockets:
        socket.say(body_of(COMPLETIONS))
        await until_ended(socket)
        socket.leave()
    first, second, third = (stream.cache_salt for stream in service.engine.streams)
    assert first == second != third


class Life(SocketLife):
    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, COMPLETIONS)
        self.asked: Counter[str | None] = Counter()

    async def act(self, action: tuple[Any, ...]) -> None:
        match action:
            case ("ask", tag, fields):
                self.socket.say({"prompt": "ab", "tag": tag, "ignore_eos": True, **fields})
                self.asked[tag] += 1
            case ("cancel", tag):
                self.socket.say({"cancel": tag})
            case _:
                await super().act(action)

    def check(self) -> None:
        """Each that was asked for ended once: nothing of it comes later, and nothing is left of it."""
        frames = self.socket.events
        answered: Counter[str | None] = Counter()
        begun: set[str | None] = set()
        for frame in frames:
            tag, error = frame.get("tag"), frame.get("error", {})
            if error.get("param") == "cancel":
                continue
            if error.get("code") == "tag_in_use":
                answered[next(name for name in "ab" if repr(name) in error["message"])] += 1
            elif error or "done" in frame:
                answered[tag] += 1
                begun.discard(tag)
            else:
                assert "choices" in frame
                begun.add(tag)
        if not self.socket.left:
            assert not begun
            if not self.draining:  # after which nothing may be heard any more
                assert answered == self.asked
        super().check()


TAGS = st.sampled_from([None, "a", "b"])
ASKED = st.sampled_from([{"max_tokens": 1}, {"max_tokens": 5}, {"max_tokens": 3, "stream": False}, {"n": 0}])
ACTIONS = st.one_of(
    st.tuples(st.just("ask"), TAGS, ASKED),
    st.tuples(st.just("cancel"), st.sampled_from("abc")),
    st.tuples(st.just("wait"), st.integers(1, 12)),
    st.tuples(st.just("step"), st.just(1)),
    st.tuples(st.sampled_from(["stall", "read", "interrupt"])),
)


@settings(max_examples=80, deadline=None)
@given(lives(ACTIONS, 25))
def test_every_answer_ends_exactly_once(tokenizer: Tokenizer, life: tuple[list[Any], Any]) -> None:
    async def live() -> None:
        await Life(tokenizer).live(*life)

    asyncio.run(live())
