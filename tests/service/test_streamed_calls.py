"""A call's arguments reach a client of each API while the model writes them, whatever its format."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers
from tests.service.asgi import post
from tests.service.conftest import Service
from tests.service.test_anthropic import events_of as anthropic_events
from tests.service.test_responses import events_of
from tests.service.test_tools import make_room, merged, tool

TEMPLATE = "{{ tools }}<tool_call><function={% for m in messages %}{{ m.content }}{% endfor %}"
CALL = (
    "<tool_call>\n<function=write>\n<parameter=path>\n"
    "a.py\n</parameter>\n<parameter=text>\nx = 1\ny = 2\n</parameter>\n</function>\n</tool_call><|end|>"
)
ARGUMENTS = {"path": "a.py", "text": "x = 1\ny = 2"}
PARAMETERS: Any = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
    "required": ["path", "text"],
}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def writer(make_service: Callable[..., Service]) -> Callable[[str], Service]:
    """A model that writes a text, in Qwen3-Coder's format."""

    def make(text: str) -> Service:
        tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(TEMPLATE, {}))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        service = make_service(script=lambda prompt, params, index: tokens)
        service.state.tokenizer = tokenizer
        make_room(service.engine)
        return service

    return make


@pytest.fixture
def coder(writer: Callable[[str], Service]) -> Service:
    """A model that writes a file."""
    return writer(CALL)


def hold(told: list[str]) -> None:
    assert len(told) > 10, "they come piece by piece"
    assert json.loads("".join(told)) == ARGUMENTS


@pytest.mark.anyio
async def test_chat(coder: Service) -> None:
    body = {"messages": HELLO, "tools": [tool("write", PARAMETERS)], "stream": True}
    *events, _ = (await post(coder.app, "/v1/chat/completions", body)).events
    deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert deltas[0]["function"]["name"] == "write"
    hold([call["function"]["arguments"] for call in deltas if call["function"]["arguments"]])


@pytest.mark.anyio
async def test_responses(coder: Service) -> None:
    flat = {"type": "function", "name": "write", "parameters": PARAMETERS, "strict": False}
    events = events_of(
        await post(coder.app, "/v1/responses", {"input": "hello", "tools": [flat], "stream": True})
    )
    hold([event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"])
    (done,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert json.loads(done["arguments"]) == ARGUMENTS


@pytest.mark.anyio
async def test_anthropic(coder: Service) -> None:
    body = {"model": "tiny", "max_tokens": 400, "messages": HELLO, "stream": True}
    body |= {"tools": [{"name": "write", "input_schema": PARAMETERS}]}
    events = anthropic_events(await post(coder.app, "/v1/messages", body))
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    hold([delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"])


@pytest.mark.anyio
async def test_ollama(coder: Service) -> None:
    """Its calls are objects: each comes once it is whole."""
    body = {"model": "tiny", "messages": HELLO, "tools": [tool("write", PARAMETERS)], "stream": True}
    reply = await post(coder.app, "/api/chat", body)
    parts = [json.loads(line)["message"] for line in reply.body.splitlines()]
    (call,) = [call for part in parts for call in part.get("tool_calls", [])]
    assert call["function"]["arguments"] == ARGUMENTS


# -- cut ----------------------------------------------------------------------------------------------------

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOOLS = [tool("write", PARAMETERS)]
OWN = [{"name": "write", "input_schema": PARAMETERS}]
FLAT = [{"type": "function", "name": "write", "parameters": PARAMETERS}]


async def whole_and_streamed(service: Service, path: str, body: dict[str, Any]) -> list[Any]:
    """What is said and called, and why it ended: as a whole, and put together of a stream."""
    whole = (await post(service.app, path, body)).json()
    reply = await post(service.app, path, body | {"stream": True})
    if path == CHAT:
        choice = whole["choices"][0]
        return [choice["message"]["content"] or "", choice["finish_reason"], merged(reply.events)]
    if path == RESPONSES:
        names = ("type", "name", "arguments", "status")
        return [
            [[item.get(name) for name in names] for item in each["output"]]
            + [part["text"] for item in each["output"] for part in item.get("content", ())]
            for each in (whole, events_of(reply)[-1]["response"])
        ]
    events = anthropic_events(reply)
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    return [
        [[block | {"id": ""} for block in content], reason]
        for content, reason in (
            (whole["content"], whole["stop_reason"]),
            (begun, events[-2]["delta"]["stop_reason"]),
        )
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("cut", ["length", "stop"])
async def test_a_call_that_must_be_made_and_is_cut_before_it_begins_is_no_text(
    coder: Service, cut: str
) -> None:
    limits: dict[str, Any] = {"max_tokens": 14} if cut == "length" else {"stop": ["a"]}
    for choice in ("required", {"type": "function", "function": {"name": "write"}}):
        body = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, **limits}
        content, reason, streamed = await whole_and_streamed(coder, CHAT, body)
        assert (content, reason) == ("", cut)
        assert (streamed["content"], streamed["tool_calls"], streamed["finish_reason"]) == ("", [], cut)
    limits = {"max_tokens": 14} if cut == "length" else {"max_tokens": 99, "stop_sequences": ["a"]}
    body = {"model": "tiny", "messages": HELLO, "tools": OWN, "tool_choice": {"type": "any"}, **limits}
    reason = "max_tokens" if cut == "length" else "stop_sequence"
    assert await whole_and_streamed(coder, MESSAGES, body) == [[[], reason]] * 2
    limits = {"max_output_tokens": 14} if cut == "length" else {"stop": ["a"]}
    body = {"input": "hello", "tools": FLAT, "tool_choice": "required", **limits}
    status = "incomplete" if cut == "length" else "completed"
    answer = [["message", None, None, status], ""]
    assert await whole_and_streamed(coder, RESPONSES, body) == [answer] * 2


@pytest.mark.anyio
async def test_a_cut_call_is_the_same_whole_and_streamed(coder: Service) -> None:
    """It has its name, and no arguments that one could take for whole."""
    limit = CALL.index(".py")  # tokens are of a character, or of a little more
    body = {"model": "tiny", "messages": HELLO, "tools": OWN, "tool_choice": {"type": "any"}}
    answer = [[{"type": "tool_use", "id": "", "name": "write", "input": {}}], "max_tokens"]
    assert await whole_and_streamed(coder, MESSAGES, body | {"max_tokens": limit}) == [answer] * 2
    body = {"input": "hello", "tools": FLAT, "tool_choice": "required", "max_output_tokens": limit}
    item = ["function_call", "write", '{"path": "a.py', "incomplete"]
    assert await whole_and_streamed(coder, RESPONSES, body) == [[item]] * 2


@pytest.mark.anyio
async def test_a_call_that_breaks_off_is_none_that_could_be_answered(
    writer: Callable[[str], Service],
) -> None:
    broken = writer(CALL.replace("<parameter=text>", "<text>"))
    body = {"model": "tiny", "max_tokens": 900, "messages": HELLO, "tools": OWN}
    answer = [[{"type": "tool_use", "id": "", "name": "write", "input": {}}], "end_turn"]
    assert await whole_and_streamed(broken, MESSAGES, body) == [answer] * 2


@pytest.mark.anyio
async def test_a_document_is_text_whatever_stands_in_it(writer: Callable[[str], Service]) -> None:
    said = json.dumps({"answer": "<tool_call> <function=write></function></tool_call> "})
    document = writer(f"{said}<|end|>")
    body = {"messages": HELLO, "tools": TOOLS, "response_format": {"type": "json_object"}}
    content, reason, streamed = await whole_and_streamed(document, CHAT, body)
    assert (content, reason) == (said, "stop")
    assert (streamed["content"], streamed["tool_calls"], streamed["finish_reason"]) == (said, [], "stop")
