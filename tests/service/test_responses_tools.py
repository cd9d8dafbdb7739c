"""Tools in the Responses API: they are those of chat, told of as items and events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from openai.types.responses import Response

from quire.service.app import create_app
from quire.service.config import ServiceConfig
from quire.service.state import ServerState
from quire.service.text.tokenizer import Tokenizer
from tests.service import tool_templates
from tests.service.asgi import exchange, post, settle
from tests.service.asgi_socket import Socket
from tests.service.conftest import Service
from tests.service.fake_engine import FakeEngine, make_info
from tests.service.grammar_texts import accepts_grammar
from tests.service.inline_renderer import InlineRenderer
from tests.service.live import Live
from tests.service.test_responses import events_of
from tests.service.test_responses_socket import ENDS, EVENT, without
from tests.service.test_tool_parser import SNIPPETS, hermes, llama
from tests.service.test_tools import ARGUMENTS, PARAMETERS, make_room, tokenizer_with, tool

pytestmark = pytest.mark.anyio
PATH, CHAT = "/v1/responses", "/v1/chat/completions"
NAMES = ("id", "item_id", "response_id", "call_id", "created_at", "completed_at")


def flat(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> Any:
    """The tool as the Responses API writes it."""
    return {"type": "function", **tool(name, parameters, **more)["function"]}


TOOLS = [flat("get_weather", PARAMETERS, strict=False), flat("f", strict=False)]
STRICT_TOOLS = [flat("get_weather", PARAMETERS), flat("f", strict=None)]
TALK = f" I look.\n{hermes('get_weather', ARGUMENTS)}\n{hermes('f', '{}')}\n Done. "


class Speaker:
    """A service whose model says `text` and ends."""

    def __init__(self, text: str, template: str = tool_templates.HERMES, *, auto: bool = True) -> None:
        self.tokenizer = tokenizer_with(template)
        self.state = ServerState(ServiceConfig(served_model_names=("tiny",)))
        self.state.renderer = InlineRenderer()
        info = replace(make_info(self.tokenizer), max_model_len=4000, num_blocks=300)
        self.engine = FakeEngine(info, auto=auto, script=lambda prompt, params, index: self.tokens)
        self.state.set_engine(self.engine)
        self.engine.become_ready()
        self.state.tokenizer = self.tokenizer
        self.app = create_app(self.state)
        self.says(text)

    def says(self, text: str) -> None:
        self.tokens = self.tokenizer.encode(text + "<|end|>", add_special_tokens=False)

    def prompt(self, index: int) -> str:
        return self.tokenizer.decode(self.engine.streams[index].prompt, skip_special_tokens=False)

    async def reply(self, **body: Any) -> Any:
        reply = await post(self.app, PATH, {"input": "hello", "tools": TOOLS, **body})
        assert reply.status == 200, reply.body
        Response.model_validate(reply.json(), strict=True)
        return reply.json()


@pytest.fixture
async def speaker() -> AsyncIterator[Callable[..., Speaker]]:
    made: list[Speaker] = []

    def make(*given: Any, **more: Any) -> Speaker:
        made.append(Speaker(*given, **more))
        return made[-1]

    yield make
    for each in made:
        await each.state.grammar_trials.close()
        await each.state.renderer.close()


def folded(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client puts it together; every event is in its place."""
    output: list[dict[str, Any]] = []
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = ""
    for kind, event in zip(kinds[2:-1], events[2:-1], strict=True):
        if kind == "output_item.added":
            assert all(item["status"] != "in_progress" for item in output)
            output.append(json.loads(json.dumps(event["item"])))
            text = ""
        item = output[-1]
        assert event["output_index"] == len(output) - 1
        assert event.get("item_id", item["id"]) == item["id"]
        if kind in ("output_text.delta", "function_call_arguments.delta"):
            assert item["status"] == "in_progress" and event["delta"]
            text += event["delta"]
        elif kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == text
            item["arguments"] = text
        elif kind == "output_text.done":
            assert event["text"] == text
            item["content"][0]["text"] = text
        elif kind == "output_item.done":
            item["status"] = event["item"]["status"]
            assert item == event["item"]
    return output


async def answer_of(socket: Socket, count: int, kind: str = "response.completed") -> Any:
    """What ended the `count`-th request, or refused it."""

    def ends(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [event for event in events if event["type"] in ENDS | {"error"}]

    event = ends(await socket.until(lambda events: len(ends(events)) >= count))[count - 1]
    assert event["type"] == kind, event
    return event


async def test_items(speaker: Callable[..., Speaker]) -> None:
    reply = await speaker(TALK).reply()
    first, weather, call, last = reply["output"]
    assert [item["status"] for item in reply["output"]] == ["completed"] * 4
    assert first["content"][0]["text"] == " I look."
    assert last["content"][0]["text"] == "Done."
    named = [(each["type"], each["name"], each["arguments"]) for each in (weather, call)]
    assert named == [("function_call", "get_weather", ARGUMENTS), ("function_call", "f", "{}")]
    assert len({item["id"] for item in reply["output"]} | {weather["call_id"], call["call_id"]}) == 6
    assert (reply["status"], reply["tool_choice"], reply["parallel_tool_calls"]) == (
        "completed",
        "auto",
        True,
    )
    assert [(each["name"], each["strict"]) for each in reply["tools"]] == [
        ("get_weather", False),
        ("f", False),
    ]


async def test_calls_alone_have_no_message_beside_them(speaker: Callable[..., Speaker]) -> None:
    for text, template in (
        (hermes("f", "{}"), tool_templates.HERMES),
        (llama("f", "{}"), tool_templates.LLAMA),
    ):
        (call,) = (await speaker(text, template).reply())["output"]
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", "{}")


async def test_what_is_no_call_is_text(speaker: Callable[..., Speaker]) -> None:
    text = hermes("unknown", "{}") + " <tool_ca"
    service = speaker(text)
    for more in ({}, {"tool_choice": "none"}, {"tools": None}):
        (message,) = (await service.reply(**more))["output"]
        assert message["content"][0]["text"] == text


async def test_one_call_ends_it_where_only_one_may_be_made(speaker: Callable[..., Speaker]) -> None:
    service = speaker(TALK)
    reply = await service.reply(parallel_tool_calls=False)
    assert [item["type"] for item in reply["output"]] == ["message", "function_call"]
    assert (reply["status"], reply["parallel_tool_calls"]) == ("completed", False)
    assert service.engine.streams[0].aborted


async def test_events(speaker: Callable[..., Speaker]) -> None:
    service = speaker(f"I look.{hermes('f', '{}')}{hermes('get_weather', ARGUMENTS)}")
    streamed = await post(service.app, PATH, {"input": "hello", "tools": TOOLS, "stream": True})
    events = events_of(streamed)
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]
    call = ["output_item.added", *(f"function_call_arguments.{end}" for end in ("delta", "done"))]
    assert once == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *(*call, "output_item.done") * 2,
        "completed",
    ]
    assert kinds.count("function_call_arguments.delta") > 5
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["arguments"] for item in added[1:]] == ["", ""]
    assert folded(events) == events[-1]["response"]["output"]


@given(
    st.lists(SNIPPETS, max_size=8).map("".join),
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
    st.booleans(),
    st.integers(1, 300),
    st.sampled_from([tool_templates.HERMES, tool_templates.LLAMA]),
)
@settings(max_examples=60, deadline=None)
def test_however_it_comes_it_folds_to_the_same_response(
    text: str, pace: list[int], parallel: bool, limit: int, template: str
) -> None:
    body = {"input": "hello", "tools": TOOLS, "parallel_tool_calls": parallel, "max_output_tokens": limit}

    async def live() -> None:
        service = Speaker(text, template)
        whole = await service.reply(**body)
        service.engine.auto = False
        running = exchange(service.app, PATH, {**body, "stream": True})
        await service.engine.until_added(2)
        for at in range(len(service.tokens)):
            for _ in range(pace[at % len(pace)]):
                service.engine.step()
            await settle()
            if not service.engine.active:
                break
        events = events_of(await running.finish())
        final = events[-1]["response"]
        assert folded(events) == final["output"]
        final = json.loads(json.dumps(final))
        got = Response.model_validate(whole).model_dump(mode="json")
        assert without(got, *NAMES) == without(final, *NAMES)
        for item in whole["output"]:
            if item["type"] == "function_call":
                assert (item["status"] == "completed") == is_object(item["arguments"])

    asyncio.run(live())


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


async def test_a_length_may_cut_a_call(speaker: Callable[..., Speaker]) -> None:
    service = speaker(f"I look. {hermes('get_weather', ARGUMENTS)}")
    reply = await service.reply(max_output_tokens=len(service.tokens) - 30)
    message, call = reply["output"]
    assert (reply["status"], message["status"], call["status"]) == ("incomplete", "completed", "incomplete")
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert ARGUMENTS.startswith(call["arguments"]) and call["arguments"]


@pytest.mark.parametrize("end", ["cancelled", "failed"])
async def test_an_end_within_a_call(speaker: Callable[..., Speaker], end: str) -> None:
    service = speaker(f"I look. {hermes('get_weather', ARGUMENTS)}", auto=False)
    socket = Socket(service.app).start()
    socket.create(tools=TOOLS)
    created = await socket.until_type("response.created")
    for _ in range(len(service.tokens) - 30):
        service.engine.step()
        await settle()
    if end == "cancelled":
        socket.cancel(created["response"]["id"])
    else:
        service.engine.die("CUDA error")
    last = await socket.until_type(f"response.{end}")
    assert folded(socket.events) == last["response"]["output"]
    message, call = last["response"]["output"]
    assert (message["status"], call["status"]) == ("completed", "incomplete")
    assert ARGUMENTS.startswith(call["arguments"]) and call["arguments"]
    socket.leave()


CHOICES: list[tuple[Any, Any]] = [(choice, choice) for choice in (None, "auto", "none", "required")]
CHOICES += [({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}})]


@pytest.mark.parametrize("strict", [True, False])
async def test_the_engine_is_asked_what_chat_asks_it(speaker: Callable[..., Speaker], strict: bool) -> None:
    """The same prompt, under the same grammar."""
    service = speaker("ok")
    offered = [tool("get_weather", PARAMETERS, strict=strict), tool("f", strict=strict)]
    messages = [{"role": "user", "content": "hello"}]
    grammars = set()
    for choice, chat_choice in CHOICES:
        for more in ({}, {"parallel_tool_calls": False}):
            body = {"messages": messages, "tools": offered, "tool_choice": chat_choice, **more}
            assert (await post(service.app, CHAT, body)).status == 200
            own = STRICT_TOOLS if strict else TOOLS
            reply = await service.reply(tools=own, tool_choice=choice, **more)
            assert reply["tool_choice"] == (choice or "auto")
            chat, response = service.engine.streams[-2:]
            assert (response.prompt, response.params.grammar) == (chat.prompt, chat.params.grammar)
            grammars.add(response.params.grammar)
    assert len(grammars) == (6 if strict else 4)


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_of_the_tools_in_the_prompt_only_those_that_are_allowed_are_called(
    speaker: Callable[..., Speaker], mode: str
) -> None:
    """The prompt is that of all, so that its beginning stays in the cache."""
    service = speaker(TALK if mode == "auto" else hermes("f", "{}"))
    allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "f"}]}
    reply = await service.reply(tool_choice=allowed)
    assert reply["tool_choice"] == allowed
    assert [item["name"] for item in reply["output"] if item["type"] == "function_call"] == ["f"]
    named = [{"type": "function", "function": {"name": "f"}}]
    chat_choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    messages = [{"role": "user", "content": "hello"}]
    offered = [tool("get_weather", PARAMETERS), tool("f")]
    body = {"messages": messages, "tools": offered, "tool_choice": chat_choice}
    assert (await post(service.app, CHAT, body)).status == 200
    await service.reply(tool_choice="auto")
    response, chat, whole = service.engine.streams
    assert response.prompt == chat.prompt == whole.prompt
    grammar = response.params.grammar
    assert grammar == chat.params.grammar
    assert accepts_grammar(service.tokenizer, grammar, hermes("f", "{}"))
    assert not accepts_grammar(service.tokenizer, grammar, hermes("get_weather", ARGUMENTS))
    assert accepts_grammar(service.tokenizer, grammar, "I say so.") == (mode == "auto")
    other = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "g"}]}
    refused = await post(service.app, PATH, {"input": "hello", "tools": TOOLS, "tool_choice": other})
    assert (refused.status, refused.error["param"]) == (400, "tool_choice")


CALLED = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
ANSWER = {"type": "function_call_output", "call_id": "a", "output": "x"}
NOT = {"type": "json_schema", "name": "answer", "schema": {"not": {}}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("tools", {"tools": [flat("f"), flat("f")]}, "two functions named 'f'"),
    ("tools", {"tools": [flat("f", {"type": "string"})]}, "type object"),
    ("tools[0].name", {"tools": [flat("a b")]}, "regex"),
    ("tool_choice", {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "there are none"),
    ("tools[0].type", {"tools": [{"name": "f"}]}, "type"),
    ("tools[0].function", {"tools": [tool("f")]}, "function"),
    ("tools[0].defer_loading", {"tools": [flat("f") | {"defer_loading": True}]}, "defer_loading"),
    ("tools", {"tools": [flat("f", {"type": "object", "properties": {"a": {"not": {}}}})]}, "not"),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "'g'"),
    ("tool_choice.type", {"tools": TOOLS, "tool_choice": {"type": "custom"}}, "'allowed_tools', 'function'"),
    ("tool_choice.mode", {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "missing"),
    ("tool_choice", {"tool_choice": "required"}, "tools"),
    ("text.format", {"tools": TOOLS, "text": {"format": NOT}}, "not"),
    ("ignore_eos", {"tools": TOOLS, "ignore_eos": True}, "tools"),
    ("input[0]", {"input": [CALLED | {"output": "x"}]}, "has no output"),
    ("input[0]", {"input": [{"type": "function_call", "call_id": "a"}]}, "needs name"),
    ("input[0]", {"input": [{"role": "user", "content": "a", "call_id": "a"}]}, "has no call_id"),
    ("input[0].type", {"input": [{"type": "custom_tool_call"}]}, "custom_tool_call"),
    ("input[0].output[0].type", {"input": [ANSWER | {"output": [{"type": "input_image"}]}]}, "input_image"),
    ("input[0].call_id", {"input": [ANSWER, CALLED]}, "'a'"),
    ("input[1].call_id", {"input": [CALLED, ANSWER | {"call_id": "b"}]}, "'b'"),
]


async def test_refusals_name_the_field(speaker: Callable[..., Speaker], service: Service) -> None:
    knows = speaker("x")
    for param, fields, words in REFUSED:
        reply = await post(knows.app, PATH, {"input": "hello", **fields})
        assert (reply.status, reply.error["param"]) == (400, param), (fields, reply.error)
        assert words in reply.error["message"], reply.error
    for param, fields in (("tools", {"tools": TOOLS}), ("input", {"input": [CALLED, ANSWER]})):
        reply = await post(service.app, PATH, {"input": "hello", **fields})
        assert (reply.status, reply.error["param"]) == (400, param), "a template without tools"
        assert "knows no tools" in reply.error["message"]
    assert not knows.engine.streams and not service.engine.streams


async def test_conversations_are_rendered_as_chats(speaker: Callable[..., Speaker]) -> None:
    """Those over HTTP, where items are sent again, and those that a socket remembers."""
    service = speaker(TALK)
    reply = await service.reply()
    answers: Any = [
        {"type": "function_call_output", "call_id": reply["output"][1]["call_id"], "output": "sunny"},
        {
            "type": "function_call_output",
            "call_id": reply["output"][2]["call_id"],
            "output": [{"type": "input_text", "text": text} for text in ("1", "2")],
        },
    ]
    question = {"role": "user", "content": "hello"}
    await service.reply(input=[question, *reply["output"], *answers])

    def call(name: str, arguments: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}

    calls = [call("get_weather", ARGUMENTS), call("f", "{}")]
    messages = [
        question,
        {"role": "assistant", "content": " I look.", "tool_calls": calls},
        {"role": "assistant", "content": "Done."},
        {"role": "tool", "tool_call_id": "get_weather", "content": "sunny"},
        {"role": "tool", "tool_call_id": "f", "content": "1\n2"},
    ]
    tools = [tool("get_weather", PARAMETERS), tool("f")]
    await post(service.app, CHAT, {"messages": messages, "tools": tools})
    socket = Socket(service.app).start()
    socket.create(tools=TOOLS)
    first = (await answer_of(socket, 1))["response"]
    for answer, made in zip(answers, first["output"][1:3], strict=True):
        answer["call_id"] = made["call_id"]
    for at in (2, 3):  # from the same response, twice
        socket.say(
            {
                "type": "response.create",
                "input": answers,
                "tools": TOOLS,
                "previous_response_id": first["id"],
            }
        )
        await answer_of(socket, at)
    prompts = [service.prompt(at) for at in (1, 2, 4, 5)]
    assert prompts[0] == prompts[1] == prompts[2] == prompts[3]
    assert "sunny" in prompts[0] and '"days": 3' in prompts[0]
    socket.leave()


async def test_a_socket_tells_of_calls_as_http_does(speaker: Callable[..., Speaker]) -> None:
    """And refuses what answers none; a call that was cut is forgotten."""
    service = speaker(TALK)
    streamed = await post(service.app, PATH, {"input": "hello", "tools": TOOLS, "stream": True})
    socket = Socket(service.app).start()
    socket.create(tools=TOOLS, store=True)
    first = (await answer_of(socket, 1))["response"]
    events = [EVENT.validate_python(event, strict=True).model_dump() for event in socket.events]
    assert folded(events) == events[-1]["response"]["output"]
    http = events_of(streamed)[-1]["response"]
    assert without(events[-1]["response"], *NAMES) == without(http, *NAMES)
    service.says(hermes("get_weather", ARGUMENTS))
    cut = len(service.tokens) - 30
    socket.create("more", tools=TOOLS, previous_response_id=first["id"], max_output_tokens=cut)
    last = (await answer_of(socket, 2, "response.incomplete"))["response"]
    assert [(item["type"], item["status"]) for item in last["output"]] == [("function_call", "incomplete")]
    for count, call_id in enumerate((last["output"][0]["call_id"], "other"), 3):
        answer = {"type": "function_call_output", "call_id": call_id, "output": "sunny"}
        again = {"type": "response.create", "input": [answer], "previous_response_id": last["id"]}
        socket.say(again)
        error = await answer_of(socket, count, "error")
        assert (error["status"], error["error"]["param"]) == (400, "input[0].call_id")
    socket.create("again", previous_response_id=last["id"])
    await answer_of(socket, 5)
    assert service.prompt(-1).count("<tool_call>") == 2
    socket.leave()


# -- openai's client ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talker() -> Iterator[openai.OpenAI]:
    """A server whose model calls, and says how the weather is when it was told."""
    tokenizer: Tokenizer = tokenizer_with(tool_templates.HERMES)
    calling, done = (
        tokenizer.encode(f"{text}<|end|>", add_special_tokens=False)
        for text in (f"I look. {hermes('get_weather', ARGUMENTS)}", "It is sunny.")
    )

    def script(prompt: list[int], params: Any, index: int) -> list[int]:
        told = "<tool_response>" in tokenizer.decode(prompt, skip_special_tokens=False)
        return done if told else calling

    server = Live(tokenizer, script=script)
    make_room(server.engine)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    assert server.end() == 0


def weather(response: Any) -> Any:
    """What a client's loop adds to its input."""
    return [
        *response.output,
        *(
            {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
            for item in response.output
            if item.type == "function_call"
        ),
    ]


def test_openai_client(talker: openai.OpenAI) -> None:
    said: Any = [{"role": "user", "content": "hello"}]
    asked: Any = {"model": "tiny", "tools": STRICT_TOOLS}
    first = talker.responses.create(input=said, **asked)
    assert first.output_text == "I look."
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, call.arguments, call.status) == ("get_weather", ARGUMENTS, "completed")
    assert first.tools[0].type == "function" and first.tools[0].strict is True
    last = talker.responses.create(input=[*said, *weather(first)], **asked)
    assert [item.type for item in last.output] == ["message"] and last.output_text == "It is sunny."


def test_openai_client_streams(talker: openai.OpenAI) -> None:
    said: Any = [{"role": "user", "content": "hello"}]
    asked: Any = {"model": "tiny", "tools": TOOLS}
    with talker.responses.stream(input=said, **asked) as stream:
        deltas = [event for event in stream if event.type == "response.function_call_arguments.delta"]
        first = stream.get_final_response()
    assert len(deltas) > 3 and deltas[-1].snapshot == ARGUMENTS
    assert first.output[1].type == "function_call" and first.output[1].arguments == ARGUMENTS
    items, kinds = [], set()
    for event in talker.responses.create(input=[*said, *weather(first)], stream=True, **asked):
        kinds.add(event.type)
        if event.type == "response.output_item.done":
            items.append(event.item)
    assert [item.type for item in items] == ["message"]
    assert "response.function_call_arguments.delta" not in kinds
