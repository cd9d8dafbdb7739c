"""What clients send by default, what has no effect, and what they send back of earlier answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from quire.service.api.openapi import describe
from quire.service.api.operations import OPERATIONS
from quire.service.http.tidying import structs_in
from quire.service.inert import INERT, Inert
from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers, tool_templates
from tests.service.asgi import Exchange, Reply, post
from tests.service.conftest import Service
from tests.service.grammar_texts import accepts_grammar
from tests.service.test_tool_parser import hermes

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]


def ignored(reply: Reply) -> list[str]:
    assert reply.status == 200, reply.body
    return sorted(reply.headers.get("x-quire-ignored", "").split(", "))


async def ask(service: Service, path: str = CHAT, **fields: Any) -> Reply:
    given = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    return await post(service.app, path, {**given, "max_tokens": 2, "seed": 1, **fields})


BREAKPOINT = {"mode": "explicit"}
CACHED = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}

# What popular clients send by default, and the fields of it that have no effect.
DEFAULTS: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "langchain",
        {
            "messages": [{**HELLO[0], "name": "ann"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        ["messages[].name"],
    ),
    (
        "agents",
        {"tools": [], "tool_choice": None, "parallel_tool_calls": None, "metadata": {}, "store": False},
        [""],
    ),
    (
        "openai",
        {"metadata": {"run": "7"}, "store": True, "service_tier": "auto", "user": "me"},
        ["metadata", "service_tier", "store", "user"],
    ),
    (
        "vllm",
        {
            "add_special_tokens": False,
            "skip_special_tokens": None,
            "bad_words": [],
            "request_id": "r",
            "length_penalty": 1.0,
            "early_stopping": False,
        },
        ["request_id"],
    ),
    (
        "openrouter",
        {"messages": [{"role": "user", "content": [CACHED]}]},
        ["messages[].content[].cache_control"],
    ),
    (
        "openai's cache",
        {
            "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "hello", "prompt_cache_breakpoint": BREAKPOINT}],
                }
            ],
        },
        ["messages[].content[].prompt_cache_breakpoint", "prompt_cache_options"],
    ),
    (
        "codex",
        {"prompt_cache_key": "k", "verbosity": "low", "reasoning_effort": "high"},
        ["prompt_cache_key", "reasoning_effort", "verbosity"],
    ),
    (
        "obfuscating",
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        ["stream_options.include_obfuscation"],
    ),
    (
        "empty",
        {"audio": None, "functions": [], "logit_bias": None, "stop": None, "top_logprobs": 0, "n": None},
        [""],
    ),
]


@pytest.mark.parametrize(("client", "fields", "names"), DEFAULTS, ids=[case[0] for case in DEFAULTS])
async def test_what_clients_send_by_default_is_accepted(
    service: Service, client: str, fields: dict[str, Any], names: list[str]
) -> None:
    plain = await ask(service)
    assert ignored(plain) == [""]
    assert ignored(await ask(service, **fields)) == names, client
    first, second = service.engine.streams
    assert (first.prompt, first.params) == (second.prompt, second.params), "it changes no token"


async def test_an_ignored_field_is_of_its_type_and_the_log_tells_of_it_once(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    for fields, param in (
        ({"store": "yes"}, "store"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(at): "" for at in range(17)}}, "metadata"),
        ({"messages": [{**HELLO[0], "cache_control": {"a": "x" * (1 << 16)}}]}, "messages[0].cache_control"),
        ({"messages": [{**HELLO[0], "phase": "first"}]}, "messages[0].phase"),
    ):
        reply = await ask(service, **fields)
        assert (reply.status, reply.error["param"]) == (400, param)
    with caplog.at_level(logging.INFO, "quire.service"):
        for _ in range(2):
            assert ignored(await ask(service, store=True)) == ["store"]
    assert [record.getMessage() for record in caplog.records if "store" in record.getMessage()] == [
        "the field store of a request has no effect here: it is ignored from now on"
    ]


async def test_what_would_change_the_answer_is_refused_by_name(make_service: Callable[..., Service]) -> None:
    """Where unknown fields are ignored, too."""
    for policy in ("refuse", "ignore"):
        service = make_service(unknown_fields=policy)
        for path, fields, param in (
            (CHAT, {"logits_processors": ["os.system"]}, "logits_processors"),
            (CHAT, {"audio": {"voice": "alloy"}}, "audio"),
            (CHAT, {"web_search_options": {}}, "web_search_options"),
            (CHAT, {"moderation": {"model": "omni-moderation-latest"}}, "moderation"),
            (CHAT, {"prediction": {"type": "content", "content": "x"}}, "prediction"),
            (CHAT, {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
            (TEXT, {"suffix": "the end"}, "suffix"),
        ):
            reply = await ask(service, path, **fields)
            assert (reply.status, reply.error["param"], reply.error["code"]) == (
                400, param, "unsupported_field"
            )  # fmt: skip
        assert not service.engine.streams


async def test_unknown_fields_are_ignored_where_the_server_is_told_so(
    make_service: Callable[..., Service],
) -> None:
    lenient, strict = make_service(unknown_fields="ignore"), make_service()
    fields = {"sparkle": 1, "messages": [{**HELLO[0], "mood": {"x": 1}}], "in\nvalid": True}
    assert ignored(await ask(lenient, **fields)) == ["?", "messages[].mood", "sparkle"]
    assert (await ask(strict, **fields)).error["code"] == "unknown_field"
    reply = await ask(lenient, sparkle=1, temperature="hot")
    assert (reply.status, reply.error["param"]) == (400, "temperature"), "known ones are still checked"


async def test_a_response_has_openai_s_cache_and_its_older_name_of_a_summary(service: Service) -> None:
    part = {"type": "input_text", "text": "hello", "prompt_cache_breakpoint": BREAKPOINT}
    body = {
        "input": [{"role": "user", "content": [part]}],
        "prompt_cache_options": {"mode": "explicit"},
        "reasoning": {"generate_summary": "auto"},
    }
    assert ignored(await post(service.app, "/v1/responses", body)) == [
        "input[].content[].prompt_cache_breakpoint",
        "prompt_cache_options",
        "reasoning.generate_summary",
    ]


async def test_what_openai_returns_of_calls_is_taken_back(caller: Service) -> None:
    direct = {"caller": {"type": "direct"}}
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", **direct}
    output = {"type": "function_call_output", "call_id": "a", "output": "x", "name": "f", **direct}
    body = {
        "input": [{"role": "user", "content": "hello"}, call, output],
        "reasoning": {"context": "auto", "mode": "standard"},
    }
    expected = ["input[].caller", "input[].name", "reasoning.context", "reasoning.mode"]
    assert ignored(await post(caller.app, "/v1/responses", body)) == expected
    result = "<tool_response>\n{{ message.content }}"
    shows = tool_templates.HERMES.replace(result, "[{{ message.name }}|{{ message.content }}]")
    caller.state.tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(shows, {}))
    assert "input[].name" not in ignored(await post(caller.app, "/v1/responses", body))
    assert "[f|x]" in prompt_of(caller)


async def test_what_is_about_other_models_and_bills_has_no_effect_on_messages(service: Service) -> None:
    fields: dict[str, Any] = {
        "diagnostics": {"previous_message_id": None},
        "fallbacks": "default",
        "fallback_credit_token": "token",
        "billing_policy": {"type": "billing_policy", "bill_to": "self"},
    }
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 2}
    assert ignored(await post(service.app, "/v1/messages", body | fields)) == sorted(fields)
    for name, value in (("compaction", {"type": "a"}), ("container", "container_1")):
        reply = await post(service.app, "/v1/messages", {**body, name: value})
        assert (reply.status, reply.json()["error"]["code"]) == (400, "unsupported_field")
        assert reply.json()["error"]["message"].startswith(name)


FLAT = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}
OWN = {"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
HOSTED = {"type": "web_search", "filters": None, "sparkle": 1}
RESPONSES: dict[str, Any] = {"path": "/v1/responses", "input": "hello", "max_output_tokens": 2}
MESSAGES: dict[str, Any] = {"path": "/v1/messages", "model": "tiny", "messages": HELLO, "max_tokens": 2}
NEUTRAL = {"output_schema": None, "allowed_callers": ["direct"], "async": False, "defer_loading": False}


@pytest.mark.parametrize(
    ("asked", "tool", "neutral", "unsupported", "names"),
    [
        (RESPONSES, FLAT, NEUTRAL, {"async": True}, ["tools[].allowed_callers", "tools[].cache_control"]),
        (MESSAGES, OWN, {"input_examples": None}, {"input_examples": [{}]}, ["cache_control"]),
    ],
    ids=["responses", "messages"],
)
async def test_tools_are_tidied_and_those_of_other_types_left_as_they_are(
    make_service: Callable[..., Service],
    asked: Any,
    tool: Any,
    neutral: Any,
    unsupported: Any,
    names: list[str],
) -> None:
    body = {name: value for name, value in asked.items() if name != "path"}
    for policy in ("refuse", "ignore"):
        service = make_service(unknown_fields=policy)
        knowing = ChatTemplate(tool_templates.HERMES, {})
        service.state.tokenizer = Tokenizer(tiny_tokenizers.byte_level(), knowing)

        async def offer(fields: dict[str, Any], service: Service = service) -> Reply:
            return await post(service.app, asked["path"], {**body, "tools": [{**tool, **fields}, HOSTED]})

        assert ignored(await offer({**neutral, "foo": None})) == sorted([*names, "web_search"])
        unknown = await offer({"bar": {"x": 1}})
        if policy == "ignore":
            assert "tools[].bar" in ignored(unknown)
        else:
            assert unknown.status == 400 and "tools[0].bar" in unknown.json()["error"]["message"]
        refused = await offer(unsupported)
        assert refused.status == 400
        assert f"tools[0].{next(iter(unsupported))} is not supported" in refused.json()["error"]["message"]


# -- sent back ----------------------------------------------------------------------------------------------


@pytest.fixture
def caller(make_service: Callable[..., Service]) -> Service:
    """A model with tools that says something and calls one."""
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(tool_templates.HERMES, {}))
    tokens = tokenizer.encode(f"I look. {hermes('f', '{}')}<|end|>", add_special_tokens=False)
    service = make_service(script=lambda prompt, params, index: tokens)
    service.state.tokenizer = tokenizer
    return service


def prompt_of(service: Service) -> str:
    assert service.state.tokenizer is not None
    return service.state.tokenizer.decode(service.engine.streams[-1].prompt, skip_special_tokens=False)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": False}}]


async def test_answers_come_back_whole(caller: Service) -> None:
    """Quire's own; with OpenAI's properties; and as Open WebUI and LangChain send them."""
    body = {"messages": HELLO, "tools": TOOLS}
    message = (await post(caller.app, CHAT, body)).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    own = ChatCompletion.model_validate((await post(caller.app, CHAT, body)).json()).choices[0].message
    for said in (
        message,
        own.model_dump() | {"tool_calls": [call]},
        {**message, "tool_calls": [call | {"index": 0}], "phase": "commentary", "annotations": []},
        {**message, "content": [{"type": "text", "text": message["content"]}], "name": "helper"},
    ):
        result = {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": "f",
            "content": [{"type": "text", "text": "ok"}],
        }
        reply = await post(caller.app, CHAT, {"messages": [*HELLO, said, result], "tools": TOOLS})
        assert reply.status == 200, reply.body
        prompt = prompt_of(caller)
        assert "<|assistant|>I look.<tool_call>" in prompt and "ok\n</tool_response>" in prompt


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "nonsense", ""])
async def test_broken_arguments_reach_the_template_as_text(caller: Service, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    assert (await post(caller.app, CHAT, {"messages": messages})).status == 200
    shown = json.dumps(arguments) if arguments else "{}"
    assert f'"arguments": {shown}}}' in prompt_of(caller)


async def test_refusals_thoughts_and_names_reach_the_template(make_service: Callable[..., Service]) -> None:
    source = "{% for m in messages %}[{{ m.name }}|{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    service = make_service()
    service.state.tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(source, {}))
    messages = [
        {"role": "user", "content": "a", "name": "ann"},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "nor"}], "reasoning": "hm"},
        {"role": "assistant", "content": "b", "reasoning_content": "so"},
        {"role": "assistant"},
    ]
    assert (await post(service.app, CHAT, {"messages": messages, "max_tokens": 1})).status == 200
    assert prompt_of(service) == "[ann||a][||no][|hm|nor][|so|b][||]"


async def test_names_and_thoughts_that_a_template_does_not_show_are_named(service: Service) -> None:
    thought = {"role": "assistant", "content": "b", "reasoning": "so", "reasoning_content": "so"}
    messages = [*HELLO, thought, {"role": "user", "content": "a", "name": "ann"}]
    blocks = {"role": "assistant", "thinking_blocks": [{"type": "thinking", "thinking": "so"}]}
    messages.append(blocks | {"content": "c"})
    fields = ("name", "reasoning", "reasoning_content", "thinking_blocks")
    expected = [f"messages[].{field}" for field in fields]
    assert ignored(await ask(service, messages=messages)) == expected
    assert ignored(await post(service.app, "/tokenize", {"messages": messages})) == expected
    shows = "{% for m in messages %}{{ m.name }}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    service.state.tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(shows, {}))
    assert ignored(await ask(service, messages=messages)) == [""]
    assert ignored(await post(service.app, "/tokenize", {"messages": messages})) == [""]


async def test_what_litellm_returns_is_taken_back(make_service: Callable[..., Service]) -> None:
    source = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    service = make_service()
    service.state.tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(source, {}))
    first = {"type": "thinking", "thinking": "hm", "signature": "x", "index": 0}
    blocks = [first, {"type": "redacted_thinking", "data": "y"}, {"type": "thinking", "thinking": "so"}]
    said = {"role": "assistant", "content": "a", "images": [], "annotations": [], "thinking_blocks": blocks}
    reply = await ask(service, messages=[*HELLO, said, {**said, "reasoning_content": "hm so"}])
    assert ignored(reply) == [
        f"messages[].thinking_blocks[].{field}" for field in ("data", "index", "signature")
    ]
    assert prompt_of(service) == "[|hello][hm\nso|a][hm so|a]"
    image = await ask(service, messages=[{**said, "images": [{"image_url": {"url": "data:"}}]}])
    assert (image.status, image.error["param"]) == (400, "messages[0].images")


async def test_tokenize_sees_what_a_chat_sees(caller: Service) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I "}]
    for body in ({"messages": HELLO, "tools": TOOLS}, {"messages": begun, "continue_final_message": True}):
        assert (await post(caller.app, CHAT, body)).status == 200
        reply = await post(caller.app, "/tokenize", body)
        assert reply.json()["tokens"] == caller.engine.streams[-1].prompt
    for body in (
        {"messages": begun, "continue_final_message": True, "add_generation_prompt": True},
        {"messages": HELLO, "chat_template_kwargs": {"thinking": True}},
    ):
        asked = await post(caller.app, CHAT, body)
        reply = await post(caller.app, "/tokenize", body)
        assert reply.status == asked.status
        assert reply.body == asked.body if asked.status == 400 else "x-quire-ignored" in asked.headers
        assert reply.headers.get("x-quire-ignored") == asked.headers.get("x-quire-ignored")


def call_of(identity: str) -> dict[str, Any]:
    called = {"id": identity, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "tool_calls": [called]}


async def test_tokenize_refuses_what_a_chat_refuses(caller: Service) -> None:
    """A result that answers no call before it, and tools that do not go together."""
    result = {"role": "tool", "tool_call_id": "1", "content": "21"}
    fine = {"messages": [*HELLO, call_of("1"), result]}
    for path in (CHAT, "/tokenize"):
        assert (await post(caller.app, path, fine)).status == 200
    for body, param in (
        ({"messages": [*HELLO, result, call_of("1")]}, "messages[1].tool_call_id"),
        ({"messages": [*HELLO, call_of("2"), result]}, "messages[2].tool_call_id"),
        ({"messages": HELLO, "tools": [*TOOLS, *TOOLS]}, "tools"),
    ):
        asked = await post(caller.app, CHAT, body)
        reply = await post(caller.app, "/tokenize", body)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert reply.body == asked.body


async def ask_at(service: Service, query: bytes, path: str = CHAT) -> Reply:
    body = json.dumps({"messages": HELLO, "max_tokens": 2}).encode()
    asked = Exchange(service.app, "POST", path, body, {"content-type": "application/json"})
    asked.scope["query_string"] = query
    return await asked.start().finish()


async def test_parameters_of_the_url_have_no_effect_and_are_named(service: Service) -> None:
    """Anthropic's client sends ?beta=true, and Azure's the version of its API."""
    reply = await ask_at(service, b"beta=true&api-version=2024-10-21&beta=&%0a=1&user=me")
    assert ignored(reply) == ["?", "?api-version", "?beta", "?user"]
    assert ignored(await ask_at(service, b"")) == [""]


@pytest.mark.parametrize("name", ["stream", "max_tokens", "temperature", "messages", "functions"])
async def test_a_field_in_the_url_is_refused(service: Service, name: str) -> None:
    """Who puts it there expects something of it."""
    reply = await ask_at(service, f"{name}=1".encode())
    assert (reply.status, reply.error["param"]) == (400, name)
    assert not service.engine.streams


# -- vLLM's -------------------------------------------------------------------------------------------------


async def test_an_answer_goes_on_where_the_last_message_ends(service: Service, tokenizer: Tokenizer) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "It is "}]
    assert (await ask(service, messages=begun, continue_final_message=True)).status == 200
    expected = "<|user|>hello<|assistant|>It is "
    assert service.engine.streams[0].prompt == tokenizer.encode(expected, add_special_tokens=False)
    reply = await ask(service, messages=begun, continue_final_message=True, add_generation_prompt=True)
    assert (reply.status, reply.error["param"]) == (400, "continue_final_message")


async def test_stop_strings_and_tokens_may_be_shown(service: Service, tokenizer: Tokenizer) -> None:
    fields: dict[str, Any] = {"prompt": "hello world", "max_tokens": 20}
    for stop in ({"stop": ["o w"]}, {"stop_token_ids": tokenizer.encode("w", add_special_tokens=False)}):
        for shown in (False, True):
            reply = await ask(service, TEXT, **fields, **stop, include_stop_str_in_output=shown)
            choice = reply.json()["choices"][0]
            assert choice["finish_reason"] in ("stop", "length")
            if "stop" in stop:
                assert choice["text"] == ("hello w" if shown else "hell")


async def test_prompts_are_cut_and_special_tokens_added(service: Service, tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode("hello", add_special_tokens=True)
    for most, kept in ((2, whole[-2:]), (100, whole), (-1, whole)):
        await ask(service, TEXT, truncate_prompt_tokens=most)
        assert service.engine.streams[-1].prompt == kept
    await ask(service, TEXT, prompt="hello " * 1000, truncate_prompt_tokens=-1)
    assert len(service.engine.streams[-1].prompt) == 400 - 2
    assert (await ask(service, TEXT, truncate_prompt_tokens=0)).error["param"] == "truncate_prompt_tokens"
    bos = Tokenizer(tiny_tokenizers.with_bos())
    service.state.tokenizer = bos
    for special in (True, False):
        await ask(service, TEXT, add_special_tokens=special)
        assert service.engine.streams[-1].prompt == bos.encode("hello", add_special_tokens=special)


FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"structured_outputs": {"regex": "a+"}}, ["a", "aaa"], ["", "b"]),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, ["yes"], ["maybe"]),
    ({"structured_outputs": {"json": {"type": "integer"}}}, ["7"], ["x"]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["7"]),
    ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, ["b"], ["c"]),
    ({"bad_words": ["foo", "a/b.[x]", "\n"]}, ["", "fo o", "a/b.x"], ["a foo", "foo", "a/b.[x]", "\n"]),
]


@pytest.mark.parametrize(("fields", "good", "bad"), FORMS)
async def test_forms_are_enforced(
    service: Service, tokenizer: Tokenizer, fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert (await ask(service, **fields)).status == 200
    grammar = service.engine.streams[-1].params.grammar
    assert [text for text in good if not accepts_grammar(tokenizer, grammar, text)] == []
    assert [text for text in bad if accepts_grammar(tokenizer, grammar, text)] == []
    other = {"structured_outputs": {"choice": ["x"]}} if "bad_words" in fields else {"bad_words": ["x"]}
    assert (await ask(service, **fields, **other)).status == 400


async def test_only_allowed_tokens_and_no_end_that_is_not(service: Service, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("abd", add_special_tokens=False)
    (end,) = tokenizer.encode("<|end|>", add_special_tokens=False)
    for allowed, ends in ((tokens, False), ([*tokens, end], True)):
        assert (await ask(service, allowed_token_ids=allowed)).status == 200
        params = service.engine.streams[-1].params
        assert accepts_grammar(tokenizer, params.grammar, "dab")
        assert not accepts_grammar(tokenizer, params.grammar, "abc")
        assert (end in params.logit_bias) is not ends
    reply = await ask(service, allowed_token_ids=[320])
    assert (reply.status, reply.error["param"]) == (400, "allowed_token_ids")


# -- as published -------------------------------------------------------------------------------------------


async def test_answers_are_whole_by_openai_s_types(caller: Service, service: Service) -> None:
    """Every property that they require is there, and each has its type."""
    for asked, fields in (
        (caller, {"tools": TOOLS}),
        (service, {"logprobs": True, "top_logprobs": 2, "n": 2}),
    ):
        reply = await ask(asked, **{"max_tokens": 100} | fields)
        ChatCompletion.model_validate_json(reply.body, strict=True)
        message = reply.json()["choices"][0]["message"]
        assert message["refusal"] is None and message["annotations"] == []
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await ask(asked, **{"max_tokens": 100} | fields | options)
        for event in streamed.events[:-1]:
            ChatCompletionChunk.model_validate_json(json.dumps(event), strict=True)
    reply = await ask(service, TEXT, logprobs=2)
    Completion.model_validate_json(reply.body, strict=True)


def test_the_table_is_of_types_that_requests_have_and_the_description_tells_of_it() -> None:
    kinds = {kind for each in OPERATIONS if each.request for kind in structs_in(each.request)}
    named = {base.__name__: kind.__name__ for kind in kinds for base in kind.__mro__}
    schemas = describe("1")["components"]["schemas"]
    for name, rows in INERT.items():
        assert name in named, f"{name} is no type of a request"
        for row in rows:
            told = schemas[named[name]]["properties"][row.name]["anyOf"][0]["description"]
            assert told == ("No effect: " if isinstance(row, Inert) else "Not supported: ") + row.why
