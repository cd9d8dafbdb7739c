"""POST /v1/messages, as Anthropic's own client and Claude Code use it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from quire.engine.messages import Output
from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers, tool_templates
from tests.service.asgi import Reply, exchange, post
from tests.service.conftest import CHAT_TEMPLATE, Service
from tests.service.live import Live
from tests.service.test_tool_parser import hermes
from tests.service.test_tools import make_room

if TYPE_CHECKING:
    import anthropic

PATH = "/v1/messages"
HELLO: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "How warm it is.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
UNKNOWN_TYPE: Any = {"type": "json_schema", "schema": {"type": "thing"}}
ARGUMENTS = '{"city": "Bär 🙂"}'


@pytest.fixture
def client(live: Live) -> Iterator[anthropic.Anthropic]:
    import anthropic  # a tenth of what importing all tests took, in each process that runs some

    with anthropic.Anthropic(base_url=live.url, api_key="key", max_retries=0) as client:
        yield client


@pytest.fixture
def calling(make_live: Callable[..., Live]) -> Iterator[anthropic.Anthropic]:
    """A model that says something, calls a tool, and ends."""
    import anthropic

    tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(tool_templates.HERMES, {}))
    said = f"I look.\n{hermes('get_weather', ARGUMENTS)}<|end|>"
    tokens = tokenizer.encode(said, add_special_tokens=False)
    live = make_live(script=lambda prompt, params, index: tokens)
    live.server.state.tokenizer = tokenizer
    make_room(live.engine)
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        yield client


def events_of(reply: Reply) -> list[dict[str, Any]]:
    """Each is named by its `event:` line."""
    events = []
    for block in reply.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="tiny", max_tokens=9, system="be kind", messages=HELLO)
    (block,) = message.content
    assert block.type == "text" and block.text
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    counted = client.messages.count_tokens(model="tiny", system="be kind", messages=HELLO)
    assert message.usage.cache_read_input_tokens == 0
    assert (message.usage.input_tokens, message.usage.output_tokens) == (counted.input_tokens, 9)
    said: Any = {"role": message.role, "content": [block.model_dump()]}
    client.messages.create(model="tiny", max_tokens=1, messages=[*HELLO, said, *HELLO])


def test_stream(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="tiny", max_tokens=9, messages=HELLO)
    with client.messages.stream(model="tiny", max_tokens=9, messages=HELLO) as stream:
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [block.text for block in whole.content]  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)


def test_models(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type) == ("tiny", "model")
    assert client.models.retrieve("tiny") == model


def test_keys_and_errors(live: Live, client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(model="tiny", max_tokens=1, messages=HELLO, extra_body={"temperature": 1.5})
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=1, messages=HELLO)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": "b" * 500}])
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=live.url, api_key="wrong", max_retries=0).models.list()
    bearer = anthropic.Anthropic(base_url=live.url, auth_token="key", api_key=None, max_retries=0)
    assert bearer.messages.create(model="tiny", max_tokens=9, messages=HELLO).content


def test_tools(calling: anthropic.Anthropic) -> None:
    """A call comes whole and streamed, and its result goes back with what was said."""
    message = calling.messages.create(model="tiny", max_tokens=200, messages=HELLO, tools=[WEATHER])
    text, call = message.content
    assert text.type == "text" and text.text == "I look."
    assert call.type == "tool_use" and (call.name, call.input) == ("get_weather", json.loads(ARGUMENTS))
    assert message.stop_reason == "tool_use"
    with calling.messages.stream(model="tiny", max_tokens=200, messages=HELLO, tools=[WEATHER]) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use"]
    assert final.content[1].input == call.input  # type: ignore[union-attr]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "21 °C"}
    later: Any = [
        *HELLO,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    assert calling.messages.create(model="tiny", max_tokens=200, messages=later, tools=[WEATHER]).content


@pytest.fixture
def prompt_of(service: Service, tokenizer: Tokenizer) -> Callable[[], str]:
    """The prompt that the engine was given last."""
    return lambda: tokenizer.decode(service.engine.streams[-1].prompt, skip_special_tokens=False)


async def ask(service: Service, **more: Any) -> Reply:
    reply = await post(service.app, PATH, {"model": "tiny", "max_tokens": 4, "messages": HELLO} | more)
    assert reply.status == 200, reply.body
    return reply


@pytest.mark.anyio
async def test_events_come_in_order(service: Service) -> None:
    service.engine.cached_tokens = 3
    events = events_of(await ask(service, stream=True, max_tokens=2))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    prompt = len(service.engine.streams[0].prompt)
    assert events[0]["message"]["usage"] == {
        "input_tokens": prompt - 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": events[0]["message"]["usage"]["output_tokens"],
    }
    assert events[-2]["usage"]["output_tokens"] == 2
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


@pytest.mark.anyio
async def test_failure_in_mid_stream_is_one_error_event(make_service: Callable[..., Service]) -> None:
    service = make_service(auto=False)
    body = {"model": "tiny", "max_tokens": 9, "messages": HELLO, "stream": True}
    running = exchange(service.app, PATH, body)
    await service.engine.until_added(1)
    for _ in range(3):
        service.engine.step()
    await running.until(b"content_block_delta")
    (stream,) = service.engine.streams
    stream.push(Output(stream.request_id, 0, [], finish_reason="error", error="the logits are not finite"))
    events = events_of(await running.finish())
    assert [event["type"] for event in events].count("error") == 1
    message = events[-1]["error"].pop("message")
    assert events[-1]["error"] == {"type": "api_error", "code": "engine_error"} and "not finite" in message
    assert "message_stop" not in [event["type"] for event in events]


@pytest.mark.anyio
async def test_a_client_that_leaves_aborts(make_service: Callable[..., Service]) -> None:
    service = make_service(auto=False)
    body = {"model": "tiny", "max_tokens": 9, "messages": HELLO, "stream": True}
    running = exchange(service.app, PATH, body)
    await service.engine.until_added(1)
    running.leave()
    assert running.task is not None
    await running.task
    assert service.engine.streams[0].aborted


@pytest.mark.anyio
async def test_what_is_sent_reaches_the_engine(service: Service, prompt_of: Callable[[], str]) -> None:
    reply = await ask(
        service,
        system=[{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": [{"type": "text", "text": "d"}]},
            {"role": "user", "content": "e"},
        ],
        temperature=0.5,
        top_p=0.25,
        top_k=7,
    )
    assert "x-quire-ignored" not in reply.headers
    assert prompt_of() == "<|assistant|>be\nkind<|user|>a\nb\nc<|assistant|>d<|user|>e<|assistant|>"
    params = service.engine.streams[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 7)


@pytest.mark.anyio
async def test_a_begun_answer_goes_on(service: Service, prompt_of: Callable[[], str]) -> None:
    reply = await ask(service, messages=[*HELLO, {"role": "assistant", "content": "the answer is ("}])
    assert prompt_of() == "<|user|>hello<|assistant|>the answer is ("
    assert reply.json()["content"]


@pytest.mark.anyio
async def test_why_it_ended(service: Service, tokenizer: Tokenizer) -> None:
    """A limit beyond the context is what agents ask for by default."""
    ends = [
        ("the cat<|end|>", {}, "end_turn", None),
        ("the cat", {"stop_sequences": ["ca"]}, "stop_sequence", "ca"),
        ("the cat", {"max_tokens": 2}, "max_tokens", None),
        ("a" * 400, {"max_tokens": 32000}, "model_context_window_exceeded", None),
    ]
    for text, more, reason, stop in ends:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        service.engine.script = lambda prompt, params, index, tokens=tokens: tokens
        message = (await ask(service, **{"max_tokens": 100, **more})).json()
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)


@pytest.mark.anyio
async def test_an_output_schema_is_enforced(service: Service) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await ask(service, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert "integer" in service.engine.streams[-1].params.grammar


def agent_request(number: int) -> dict[str, Any]:
    """As Claude Code sends it, less most of its text."""
    mark = {"type": "ephemeral"}
    line = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={number:05x};"
    return {
        "model": "tiny",
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {"type": "text", "text": line},
            {"type": "text", "text": "You are Claude Code.", "cache_control": mark},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\nNone.\n</system-reminder>"},
                    {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
                ],
            },
            {"role": "system", "content": "Available agents: none."},
        ],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "tools": [],
    }


@pytest.mark.anyio
async def test_a_coding_agents_requests_share_their_prefix(
    service: Service, prompt_of: Callable[[], str]
) -> None:
    """Its attribution line, which is another one each time, is dropped."""
    prompts = set()
    for number in range(2):
        reply = await post(
            service.app, f"{PATH}", agent_request(number), anthropic_beta="claude-code-20250219"
        )
        assert reply.status == 200, reply.body
        prompts.add(prompt_of())
    (prompt,) = prompts
    assert prompt.startswith("<|assistant|>You are Claude Code.<|user|><system-reminder>\nNone.\n")
    later = "\nhello\n<system-reminder>\nAvailable agents: none.\n</system-reminder><|assistant|>"
    assert prompt.endswith(later)
    ignored = reply.headers["x-quire-ignored"].split(", ")
    assert sorted(ignored) == [
        "cache_control",
        "context_management",
        "metadata",
        "output_config.effort",
        "thinking",
    ]
    count = await post(service.app, f"{PATH}/count_tokens", agent_request(2))  # Open WebUI sends it whole
    assert count.json() == {"input_tokens": len(service.engine.streams[-1].prompt)}
    assert {"max_tokens", "stream", "metadata"} < set(count.headers["x-quire-ignored"].split(", "))


@pytest.mark.anyio
async def test_hosted_tools_are_left_out_and_named(service: Service) -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "a b\n", "name": "x"},
    ]
    assert (await ask(service, tools=tools)).headers["x-quire-ignored"] == "web_search_20250305, tools[1]"


@pytest.mark.anyio
@pytest.mark.parametrize("max_tokens", [4, 60])
async def test_a_model_that_does_not_think_ignores_a_budget(service: Service, max_tokens: int) -> None:
    """It is named as it was given, whether or not thinking could have used it up."""
    for thinking in ({"type": "enabled", "budget_tokens": 20}, {"type": "adaptive"}):
        reply = await ask(service, max_tokens=max_tokens, thinking=thinking)
        assert reply.headers["x-quire-ignored"] == "thinking"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"unknown": 1}, "unknown"),
    ({"stop_sequences": [""]}, r"stop_sequences\[0\]"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"messages": [{"role": "assistant", "content": "so"}]}, "user"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "thinking"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
        r"messages\[0\].content\[0\].tool_use_id is 'a'",
    ),
    ({"tools": [{"name": "f"}]}, r"tools\[0\].*input_schema"),
    ({"tools": [{"name": "f", "input_schema": {"type": "object"}, "defer_loading": True}]}, "defer_loading"),
    ({"tools": [WEATHER]}, "knows no tools"),
    ({"output_config": {"format": UNKNOWN_TYPE}}, r"^output_config\.format: .* type 'thing'"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "edits"),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("more", "named"), REFUSED, ids=lambda each: each if isinstance(each, str) else "")
async def test_refusals_say_why(service: Service, more: dict[str, Any], named: str) -> None:
    body = {"model": "tiny", "max_tokens": 4, "messages": HELLO, **more}
    reply = await post(service.app, PATH, body)
    assert reply.status == 400
    error = reply.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    with pytest.raises(AssertionError, match=named):
        raise AssertionError(error["error"]["message"])


@pytest.fixture
def thinker(make_service: Callable[..., Service]) -> Service:
    """A model that thinks before it answers."""
    template = CHAT_TEMPLATE + "{# <think> is what it begins with, unless enable_thinking is false #}"
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(template, {}))
    tokens = tokenizer.encode("<think>\nso\n</think>\n\nyes<|end|>", add_special_tokens=False)
    service = make_service(script=lambda prompt, params, index: tokens)
    service.state.tokenizer = tokenizer
    return service


@pytest.mark.anyio
async def test_thinking_that_is_not_shown_parts_what_is_said(make_service: Callable[..., Service]) -> None:
    """What comes before it and what comes after are two blocks, streamed or not."""
    template = CHAT_TEMPLATE + "{# <|channel|>analysis #}"
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(template, {}))
    text = (
        "<|channel|>commentary<|message|>I look.<|return|><|start|>assistant"
        "<|channel|>analysis<|message|>hm<|return|><|start|>assistant<|channel|>final<|message|>yes<|end|>"
    )
    tokens = tokenizer.encode(text, add_special_tokens=False)
    service = make_service(script=lambda prompt, params, index: tokens)
    service.state.tokenizer = tokenizer
    make_room(service.engine)
    asked = {"max_tokens": 200, "thinking": {"type": "adaptive", "display": "omitted"}}
    whole = (await ask(service, **asked)).json()
    assert [block["text"] for block in whole["content"]] == ["I look.", "yes"]
    streamed = ["", ""]
    for event in events_of(await ask(service, stream=True, **asked)):
        if event["type"] == "content_block_delta":
            streamed[event["index"]] += event["delta"]["text"]
    assert streamed == ["I look.", "yes"]


@pytest.mark.anyio
async def test_thinking_is_a_block_of_its_own(thinker: Service) -> None:
    whole = (await ask(thinker, max_tokens=100)).json()
    thinking = {"type": "thinking", "thinking": "so", "signature": ""}
    assert whole["content"] == [thinking, {"type": "text", "text": "yes"}]
    events = events_of(await ask(thinker, max_tokens=100, stream=True))
    started = [event["content_block"]["type"] for event in events if "content_block" in event]
    assert started == ["thinking", "text"]
    thought = [
        event["delta"].get("thinking", "") for event in events if event["type"] == "content_block_delta"
    ]
    assert "".join(thought) == "so"
    adaptive = await ask(thinker, max_tokens=100, thinking={"type": "adaptive", "display": "omitted"})
    assert "x-quire-ignored" not in adaptive.headers
    hidden = adaptive.json()
    assert hidden["content"] == [{"type": "text", "text": "yes"}]
    said = {"role": "assistant", "content": whole["content"]}
    await ask(thinker, max_tokens=100, messages=[*HELLO, said, *HELLO])
