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
from tests.service.test_tools import make_room, tool

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
def coder(make_service: Callable[..., Service]) -> Service:
    """A model that writes a file in Qwen3-Coder's format."""
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(TEMPLATE, {}))
    tokens = tokenizer.encode(CALL, add_special_tokens=False)
    service = make_service(script=lambda prompt, params, index: tokens)
    service.state.tokenizer = tokenizer
    make_room(service.engine)
    return service


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
