"""The router hashes what the engine of a replica is given: the same tokens, under the same tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import json
from msgspec.structs import replace
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.service.app import create_app
from quire.service.config import ServiceConfig
from quire.service.http.codec import JsonResponse
from quire.service.http.gate import Gate
from quire.service.keys import KeyRing
from quire.service.router.prompt import (
    HEAD_CHARS,
    HEAD_TOKENS,
    MAX_COMMAS,
    MAX_WAITING_CHARS,
    Prompt,
    PromptReader,
)
from quire.service.state import ServerState
from quire.service.text.grammar_trials import GrammarTrials
from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers, tool_templates
from tests.service.asgi import post
from tests.service.fake_engine import FakeEngine, make_info

TEMPLATE = tool_templates.HERMES + (
    "{% if enable_thinking is defined and not enable_thinking %}[now]{% endif %}"
)
CONFIG = ServiceConfig(served_model_names=("tiny",), api_keys=("alice", "bob"))

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
salts = st.sampled_from([{}, {"cache_salt": "s"}, {"cache_salt": None}])
token_ids = st.lists(st.integers(0, 319), min_size=1, max_size=40)
completions = st.builds(
    lambda prompt, salt: {"prompt": prompt, "max_tokens": 1, **salt},
    st.one_of(texts, token_ids, st.lists(texts, min_size=1, max_size=3), st.lists(token_ids, min_size=1)),
    salts,
)


def parts(kind: str) -> st.SearchStrategy[Any]:
    """Content as a text, or in parts."""
    part = st.builds(lambda text: {"type": kind, "text": text}, texts)
    return st.one_of(texts, st.lists(part, min_size=1, max_size=3))


FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLED = [  # a turn in which the model called, and was answered
    {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}

chats = st.builds(
    lambda said, called, more, form, salt: {
        "messages": [*said, *called],
        "max_tokens": 1,
        **more,
        **form,
        **salt,
    },
    st.lists(
        st.builds(
            lambda role, content: {"role": role, "content": content},
            st.sampled_from(["system", "user", "assistant"]),
            parts("text"),
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([[], CALLED]),
    st.sampled_from(
        [{}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"enable_thinking": False}}]
    ),
    st.sampled_from(
        [
            {},
            {"tools": TOOLS},
            {"tools": TOOLS, "tool_choice": "none"},
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
            {"response_format": {"type": "json_object"}},
            {"response_format": SCHEMA},
        ]
    ),
    salts,
)
FLAT_TOOLS = [{"type": "function", **FUNCTION}]  # as the Responses API writes it all
FLAT_CALLED = [
    {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": '{"x": 1}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "2"},
]
items = st.one_of(
    st.builds(
        lambda role, content, more: {"role": role, "content": content, **more},
        st.sampled_from(["system", "developer", "user"]),
        parts("input_text"),
        st.sampled_from([{}, {"type": "message"}]),
    ),
    st.builds(  # a turn before, as it was returned
        lambda content: {"role": "assistant", "content": content, "id": "msg_1", "status": "completed"},
        parts("output_text"),
    ),
)
responses = st.builds(
    lambda said, more, form: {"input": said, "max_output_tokens": 1, **more, **form},
    st.one_of(
        texts,
        st.lists(items, min_size=1, max_size=6),
        st.builds(
            lambda before, after: [*before, *FLAT_CALLED, *after],
            st.lists(items, max_size=3),
            st.lists(items, max_size=2),
        ),
    ),
    st.sampled_from([{}, {"instructions": "be brief"}, {"instructions": None, "store": False}]),
    st.sampled_from(
        [
            {},
            {"tools": FLAT_TOOLS},
            {"tools": FLAT_TOOLS, "tool_choice": "none"},
            {"tools": FLAT_TOOLS, "tool_choice": {"type": "function", "name": "f"}},
            {"text": {"format": {"type": "json_object"}}},
        ]
    ),
)
USE = {"type": "tool_use", "id": "call_1", "name": "f", "input": {"x": 1}}
USED = [
    {"role": "assistant", "content": [{"type": "text", "text": "so"}, USE]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "2"}]},
]
turns = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant"]),
    parts("text"),
)
messages = st.builds(
    lambda said, used, more: {
        "model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}, *said, *used], **more
    },
    st.lists(turns, max_size=4),
    st.sampled_from([[], USED]),
    st.sampled_from(
        [
            {},
            {"system": "x-anthropic-billing-header: cch=1;\nbe brief", "thinking": {"type": "disabled"}},
            {"tools": [{"name": "f", "input_schema": {"type": "object"}}, {"type": "web_search_1"}]},
        ]
    ),
)  # fmt: skip
ollama_chats = st.builds(
    lambda said, more: {"model": "tiny", "messages": said, "options": {"num_predict": 1}, **more},
    st.lists(
        st.builds(
            lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), texts
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([{}, {"tools": TOOLS, "think": False}, {"format": "json", "keep_alive": 5}]),
)
ollama_prompts = st.builds(
    lambda text, more: {"model": "tiny", "prompt": text, "options": {"num_predict": 1}, **more},
    texts,
    st.sampled_from([{}, {"raw": True}, {"system": "be brief"}]),
)
requests = st.one_of(
    st.tuples(st.just("/v1/messages"), messages),
    st.tuples(st.just("/api/chat"), ollama_chats),
    st.tuples(st.just("/api/generate"), ollama_prompts),
    st.tuples(st.just("/v1/completions"), completions),
    st.tuples(st.just("/v1/chat/completions"), chats),
    st.tuples(st.just("/v1/responses"), responses),
)


class NoTrials(GrammarTrials):
    """Every grammar will do: none is compiled here."""

    async def check(self, *_: object) -> None:
        pass


class Both:
    """A replica and a router's reading, behind gates of one configuration."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(TEMPLATE, {}))
        state = ServerState(CONFIG)
        self.engine = FakeEngine(replace(make_info(self.tokenizer), max_model_len=1500))
        state.set_engine(self.engine)
        self.engine.become_ready()
        state.tokenizer = self.tokenizer
        state.grammar_trials = NoTrials()
        self.replica = create_app(state)
        self.router: ASGIApp = Gate(self._read, CONFIG, frozenset(), KeyRing(CONFIG.api_keys))
        self.pool = ThreadPoolExecutor(1)
        self.renderer = state.renderer
        self.reader = PromptReader(self.tokenizer, self.pool, self.renderer, max_tokens=1 << 20)
        self.read: Prompt | None = None

    async def _read(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        self.read = await self.reader.read(request, await request.body())
        await JsonResponse({})(scope, receive, send)


@pytest.fixture(scope="module")
async def both() -> AsyncIterator[Both]:
    made = Both()
    yield made
    made.pool.shutdown()
    await made.renderer.close()


pytestmark = pytest.mark.anyio


@given(requests, st.sampled_from(["alice", "bob"]))
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_the_router_reads_what_the_engine_gets(
    both: Both, asked: tuple[str, dict[str, Any]], key: str
) -> None:
    path, body = asked
    before = len(both.engine.streams)
    reply = await post(both.replica, path, body, authorization=f"Bearer {key}")
    assert reply.status == 200, reply.body
    streams = both.engine.streams[before:]
    await post(both.router, path, body, authorization=f"Bearer {key}")
    assert both.read is not None
    assert both.read.tokens == streams[0].prompt
    assert both.read.salt == streams[0].cache_salt
    assert both.read.whole == (len(streams) == 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt": 1}'),
        ("/v1/chat/completions", b'{"messages": "hi"}'),
        (
            "/v1/responses",
            b'{"input": [{"role": "user", "content": [{"type": "output_text", "text": "a"}]}]}',
        ),
        ("/v1/responses", b"{"),
        ("/v1/models", b"{}"),
    ],
)
async def test_what_is_no_request_for_tokens_has_no_prompt(both: Both, path: str, body: bytes) -> None:
    both.read = Prompt([], "", whole=True)
    await post(both.router, path, body, authorization="Bearer alice")
    assert both.read is None


async def test_long_prompts_are_read_alike(both: Both) -> None:
    """In another thread."""
    body = {"messages": [{"role": "user", "content": "hello world " * 400}]}
    await post(both.router, "/v1/chat/completions", body, authorization="Bearer alice")
    assert both.read is not None
    template = both.tokenizer.chat_template
    assert template is not None
    text = template.render(body["messages"], add_generation_prompt=True)
    assert both.read.tokens == both.tokenizer.encode(text, add_special_tokens=False)


def ask(prompt: object) -> tuple[Request, bytes]:
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    return Request({**scope, "state": {"tenant": ""}}), json.encode({"prompt": prompt})


@pytest.mark.parametrize("size", [HEAD_CHARS, HEAD_CHARS + 1, 2_000_000])
async def test_of_a_long_text_the_beginning_is_read(both: Both, size: int) -> None:
    text = ("hello world " * (size // 12 + 1))[:size]
    read = await both.reader.read(*ask(text))
    assert read is not None
    tokens = both.tokenizer.encode(text[: HEAD_CHARS // 2], add_special_tokens=True)
    known = min(len(tokens), HEAD_TOKENS) - 8  # the last ones are cut in another way
    assert read.tokens[:known] == tokens[:known]
    assert len(read.tokens) <= HEAD_TOKENS
    assert not read.whole


async def test_of_many_tokens_the_first_ones_are_read(both: Both) -> None:
    tokens = [number % 300 for number in range(HEAD_TOKENS + 1)]
    read = await both.reader.read(*ask(tokens))
    assert read == Prompt(tokens[:-1], "", whole=False)
    assert await both.reader.read(*ask(tokens[:-1])) == Prompt(tokens[:-1], "", whole=True)


async def test_what_would_hold_up_the_router_goes_by_load(both: Both) -> None:
    """Many values; many long texts at once; prompts that replicas are certain to refuse."""
    assert await both.reader.read(*ask([[1]] * (MAX_COMMAS + 2))) is None
    at_once = MAX_WAITING_CHARS // HEAD_CHARS
    text = "hello world " * (HEAD_CHARS // 12 + 1)
    read = await asyncio.gather(*(both.reader.read(*ask(text)) for _ in range(at_once + 3)))
    assert [each is None for each in read] == [False] * at_once + [True] * 3
    assert await both.reader.read(*ask(text)) is not None
    small = PromptReader(both.tokenizer, both.pool, both.renderer, max_tokens=100)
    assert await small.read(*ask([1] * 100)) is None
    assert await small.read(*ask([1] * 99)) is not None
