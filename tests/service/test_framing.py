"""An answer has the same chunks whichever way it leaves: framed for an event stream, or for a socket."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from msgspec import convert
from starlette.requests import HTTPConnection

from quire.service.answer.stream import AnswerEvents, stream
from quire.service.api import chat, completions
from quire.service.api.answers import Answer
from quire.service.api.requests.chat import ChatRequest
from quire.service.api.requests.completions import CompletionRequest
from quire.service.http.framing import SSE, TEXT, Framing
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio
CONNECTION = HTTPConnection(
    {"type": "http", "headers": [], "state": {"tenant": "", "request_id": b"r"}, "path": "/"}
)
COMMON = {"max_tokens": 5, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}


async def begin(service: Service, path: str) -> Answer:
    if path == "chat":
        messages = [{"role": "user", "content": "abc"}]
        chat_body = convert({"messages": messages} | COMMON, ChatRequest)
        return await chat.begin(service.state, CONNECTION, chat_body)
    body = convert({"prompt": ["abc", "de"]} | COMMON, CompletionRequest)
    return await completions.begin(service.state, CONNECTION, body)


async def messages_of(service: Service, path: str, framing: Framing) -> list[bytes]:
    own = await begin(service, path)
    messages: list[bytes] = []

    def tell(events: AnswerEvents) -> None:
        messages.extend(events.take())

    await stream(own.generation, own.encoder(framing), tell)
    own.generation.close()
    return messages


def without_id(message: bytes) -> bytes:
    return re.sub(rb'"id":"[^"]*","created":\d+', b"", message)


@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_a_socket_gets_the_chunks_of_an_event_stream(service: Service, path: str) -> None:
    texts = await messages_of(service, path, TEXT)
    events = await messages_of(service, path, SSE)
    assert [SSE.message(without_id(text)) for text in texts] == [without_id(event) for event in events]
    assert texts.pop() == b"[DONE]"
    chunks: list[dict[str, Any]] = [json.loads(text) for text in texts]
    assert chunks[-1]["usage"]["completion_tokens"] == (5 if path == "chat" else 10)


def test_only_event_streams_name_their_events() -> None:
    assert SSE.message(b"{}", "response.created") == b"event: response.created\ndata: {}\n\n"
    assert TEXT.message(b"{}", "response.created") == b"{}"
