"""Nothing is accepted and ignored: what we do not act on is refused with its name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from quire.service.api.operations import OPERATIONS
from tests.service.asgi import Exchange, get, post
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}

BAD_IN_BOTH: list[tuple[str, Any]] = [
    ("temperature", True),
    ("temperature", "1"),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("n", 1.0),
    ("n", True),
    ("n", 0),
    ("n", 129),
    ("n", 10**30),
    ("max_tokens", "5"),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 2.0),
    ("min_p", 1.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-300),
    ("repetition_penalty", 10.5),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("stream", 1),
    ("stream", "true"),
    ("seed", 1 << 63),
    ("seed", 0.5),
    ("stop", ""),
    ("stop", 5),
    ("stop", ["a"] * 17),
    ("stop", ["a", 1]),
    ("stop", "x" * 257),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", 5),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "x"}),
    ("logit_bias", {str(at): 1 for at in range(1025)}),
    ("logit_bias", {"-1": 1}),
    ("min_tokens", -1),
    ("min_tokens", 1000),
    ("ignore_eos", 0),
    ("prompt_logprobs", 21),
    ("return_token_ids", "yes"),
    ("user", 5),
    ("model", 5),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("cache_salt", "x" * 257),
    ("best_of", 0),
    ("best_of", 129),
    ("best_of", 2.0),
    ("best_of", True),
    ("use_beam_search", 1),
    ("use_beam_search", "true"),
    ("length_penalty", 0.5),  # without use_beam_search
    ("early_stopping", True),
    ("early_stopping", "never"),
    ("stream_options", {"include_usage": True}),  # without stream
    ("stream_options", {"include_usage": True, "continuous_usage_stats": 1}),
]
BAD: list[tuple[str, dict[str, Any], str, Any]] = [
    *(("/v1/completions", COMPLETION, name, value) for name, value in BAD_IN_BOTH),
    *(("/v1/chat/completions", CHAT, name, value) for name, value in BAD_IN_BOTH),
    *(
        ("/v1/completions", COMPLETION, name, value)
        for name, value in [
            ("prompt", 5),
            ("prompt", []),
            ("prompt", ["a", 1]),
            ("prompt", [[1], 1]),
            ("prompt", [1.0]),
            ("prompt", [True]),
            ("prompt", [-1]),
            ("prompt", None),
            ("prompt", ["a"] * 1025),
            ("logprobs", True),
            ("logprobs", 21),
            ("echo", "yes"),
            ("messages", CHAT["messages"]),
            ("top_logprobs", 1),
        ]
    ),
    *(
        ("/v1/chat/completions", CHAT, name, value)
        for name, value in [
            ("messages", []),
            ("messages", "hi"),
            ("messages", [{"role": "wizard", "content": "x"}]),
            ("messages", [{"role": "user"}]),
            ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            ("messages", [{"role": "user", "content": None}]),
            ("logprobs", 1),
            ("top_logprobs", 1),  # without logprobs
            ("echo", True),
            ("prompt", "x"),
            ("chat_template_kwargs", {"enable_thinking": 1}),
            ("add_generation_prompt", "x"),
            ("store", "no"),
            ("audio", {"voice": "alloy", "format": "wav"}),
            ("functions", [{"name": "f"}]),
            ("modalities", ["text", "audio"]),
            ("continue_final_message", True),  # of a user
            ("reasoning_effort", "much"),
        ]
    ),
    ("/tokenize", {"prompt": "a"}, "prompt", 5),
    ("/tokenize", {"prompt": "a"}, "add_generation_prompt", True),
    ("/tokenize", CHAT, "continue_final_message", True),  # of a user
    ("/v1/completions", {"prompt": [1, 2]}, "add_special_tokens", True),
    ("/v1/completions", {"prompt": [[1], [2]]}, "add_special_tokens", True),
    ("/detokenize", {"tokens": [1]}, "tokens", [320]),
    ("/detokenize", {"tokens": [1]}, "tokens", "x"),
]


@pytest.mark.parametrize(("path", "good", "name", "value"), BAD)
async def test_bad_values_are_named(
    service: Service, path: str, good: dict[str, Any], name: str, value: Any
) -> None:
    reply = await post(service.app, path, {**good, name: value})
    assert reply.status == 400
    error = reply.error
    assert re.split(r"[.\[]", error["param"])[0] == name
    assert name in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not service.engine.streams


UNKNOWN = ("beam_width", "num_beams", "tenant", "cumulative_logprob", "Temperature")


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "boss", "content": "hi"}]},
            "messages[0].role: ... 'assistant', 'developer', 'system', 'tool', 'user'",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type: ... 'refusal', 'text'",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"response_format": {"type": "xml"}},
            "response_format.type: ... 'json_object', 'json_schema', 'text'",
        ),
        (
            "/v1/responses",
            {"input": "hi", "text": {"format": {"type": "xml"}}},
            "text.format.type: ... 'json_object', 'json_schema', 'text'",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"tool_choice": "some"},
            "tool_choice: ... 'auto', 'none', 'required'",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"service_tier": "best"},
            "service_tier: ... 'auto', 'default', 'flex', 'priority', 'scale'",
        ),
        ("/v1/chat/completions", CHAT | {"modalities": ["text", "audio"]}, "modalities: ... 'text'"),
    ],
)
async def test_which_values_there_are(service: Service, path: str, body: Any, expected: str) -> None:
    where, values = expected.split(" ... ")
    message = (await post(service.app, path, body)).error["message"]
    assert message.startswith(where) and message.endswith(f"; strings allowed here: {values}")


async def test_all_requests_have_one_priority(service: Service) -> None:
    """As in vLLM, unless it was started with priorities."""
    for path, good in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        for other in (-1, 1):
            reply = await post(service.app, path, {**good, "priority": other})
            assert (reply.status, reply.error["param"]) == (400, "priority")
            assert "not supported" in reply.error["message"]
        assert (await post(service.app, path, {**good, "priority": 0})).status == 200


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            "/v1/completions",
            {"logit_bias": {"5": 1, "300": 101}},
            "logit_bias.300: Expected `float` <= 100.0",
        ),
        ("/v1/completions", {"logit_bias": {"5": 1, "x": 1}}, "logit_bias.x: Expected `int`, got `str`"),
        ("/v1/completions", {"metadata": {"a": "b", "c": 1}}, "metadata: c: Expected `str`, got `int`"),
        ("/v1/responses", {"metadata": {"a": "b", "c": 1}}, "metadata.c: Expected `str`, got `int`"),
        (
            "/v1/responses",
            {"metadata": {"x" * 70: "b"}},
            f"metadata.{'x' * 64}…: Expected `str` of length <= 64",
        ),
    ],
)
async def test_a_wrong_entry_of_an_object_is_named(
    service: Service, path: str, fields: dict[str, Any], message: str
) -> None:
    reply = await post(service.app, path, {"prompt" if path == "/v1/completions" else "input": "a", **fields})
    assert (reply.status, reply.error["message"]) == (400, message)


@pytest.mark.parametrize(
    "escape", ["\\ud800", "\\ud800x", "\\udc00 and more", "\\\\ \\ud83d\\ude00 \\ud800\\u0041 b"]
)
async def test_half_a_surrogate_pair_is_named(service: Service, escape: str) -> None:
    body = b'{"prompt": "' + escape.encode() + b'"}'
    message = (await post(service.app, "/v1/completions", body)).error["message"]
    half = "udc00" if "udc00" in escape else "ud800"
    assert f"\\{half} is half of a surrogate pair" in message


async def test_an_escaped_backslash_begins_no_surrogate(service: Service) -> None:
    for text in (b"\\\\ud800", b"\\ud83d\\ude00", b"a"):
        message = (await post(service.app, "/v1/completions", b'{"prompt": "' + text)).error["message"]
        assert message == "this is not valid JSON: Input data was truncated"


async def test_of_too_many_messages_none_is_looked_at(service: Service) -> None:
    messages = [{"role": "user", "content": "a", "unknown": 1}] * 5000
    reply = await post(service.app, "/v1/chat/completions", {"messages": messages})
    assert reply.error["message"] == "messages: Expected `array` of length <= 4096"
    assert (reply.error["param"], reply.error["code"]) == ("messages", "invalid_value")


async def test_a_base_url_with_too_little_or_too_much_is_told(service: Service) -> None:
    for path, expected in (
        (
            "/chat/completions",
            "there is no /chat/completions, but /v1/chat/completions: the base URL must end with",
        ),
        (
            "/v1/v1/messages",
            "there is no /v1/v1/messages, but /v1/messages: the base URL must end before /v1",
        ),
        ("/v1/responses/input_tokens", "there is no /v1/responses/input_tokens"),
        ("/v1/responses/compact", "there is no /v1/responses/compact"),
    ):
        reply = await post(service.app, path, COMPLETION)
        message = reply.json()["error"]["message"]
        assert (reply.status, message.startswith(expected)) == (404, True)


async def test_a_field_is_named_once(service: Service) -> None:
    for path, body, message in (
        ("/v1/chat/completions", {**CHAT, "temperature": 3}, "temperature: Expected `float` <= 2.0"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user"}]},
            "messages[0]: a message of the role 'user' needs content",
        ),
    ):
        assert (await post(service.app, path, body)).error["message"] == message


@pytest.mark.parametrize("name", UNKNOWN)
async def test_unknown_fields_are_named(service: Service, name: str) -> None:
    for path, good in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        reply = await post(service.app, path, {**good, name: 1})
        assert (reply.status, reply.error["param"], reply.error["code"]) == (400, name, "unknown_field")
        assert name in reply.error["message"]
        assert (await post(service.app, path, {**good, name: None})).status == 200


async def test_nested_unknown_fields_are_named(service: Service) -> None:
    for body, param in (
        ({"stream": True, "stream_options": {"chunk": 1}}, "stream_options.chunk"),
        ({"chat_template_kwargs": {"fast": True}}, "chat_template_kwargs.fast"),
        ({"messages": [{"role": "user", "content": "a", "nom": "b"}]}, "messages[0].nom"),
    ):
        reply = await post(service.app, "/v1/chat/completions", {**CHAT, **body})
        assert reply.status == 400
        assert (reply.error["param"], reply.error["code"]) == (param, "unknown_field")


async def test_nulls_of_a_message_are_as_if_left_out(service: Service) -> None:
    """As openai's client sends back what it has got."""
    got = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None}
    messages = [*CHAT["messages"], {"role": "assistant", "content": "hello", **got}, *CHAT["messages"]]
    plain = [*CHAT["messages"], {"role": "assistant", "content": "hello"}, *CHAT["messages"]]
    seed = (1 << 63) - 1
    for asked in (messages, plain):
        body = {"messages": asked, "max_tokens": 1, "seed": seed, "logit_bias": {"65": 1.5}}
        assert (await post(service.app, "/v1/chat/completions", body)).status == 200
        assert (await post(service.app, "/tokenize", {"messages": asked})).status == 200
    first, second = service.engine.streams
    assert first.prompt == second.prompt and first.params == second.params
    twice = b'{"messages": [{"role": "user", "content": "a", "x": null}], "messages": 5}'
    reply = await post(service.app, "/v1/chat/completions", twice)
    assert (reply.status, reply.error["param"]) == (400, "messages")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a"} x',
        b'{"prompt": ' + b"[" * 100_000,
        b"[1]",
        b'"x"',
        b"null",
    ],
)
async def test_what_is_no_json_object(service: Service, body: bytes) -> None:
    reply = await post(service.app, "/v1/completions", body)
    assert reply.status == 400
    assert reply.error["message"]
    assert not service.engine.streams


async def test_numbers_too_large_for_a_float(service: Service) -> None:
    reply = await post(service.app, "/v1/completions", b'{"prompt": "a", "temperature": 1e999}')
    assert (reply.status, reply.error["param"]) == (400, "temperature")


async def test_limits_that_differ(service: Service) -> None:
    body = {**COMPLETION, "max_tokens": 5, "max_completion_tokens": 6}
    reply = await post(service.app, "/v1/completions", body)
    assert (reply.status, reply.error["param"]) == (400, "max_completion_tokens")
    body["max_completion_tokens"] = 5
    assert (await post(service.app, "/v1/completions", body)).status == 200


async def test_prompt_logprobs_do_not_stream(service: Service) -> None:
    body = {**COMPLETION, "prompt_logprobs": 1, "stream": True}
    reply = await post(service.app, "/v1/completions", body)
    assert (reply.status, reply.error["param"]) == (400, "prompt_logprobs")


async def test_openapi_describes_every_field_with_its_limits(service: Service) -> None:
    reply = await get(service.app, "/openapi.json")
    document = reply.json()
    assert document["openapi"] == "3.1.0"
    schemas = document["components"]["schemas"]
    n = schemas["CompletionRequest"]["properties"]["n"]["anyOf"][0]
    assert (n["minimum"], n["maximum"]) == (1, 128)
    assert schemas["ChatRequest"]["additionalProperties"]["type"] == "null"
    for name in ("CompletionRequest", "ChatRequest"):
        fields = schemas[name]["properties"]
        first = {field: fields[field]["anyOf"][0] for field in fields if "anyOf" in fields[field]}
        assert (first["best_of"]["minimum"], first["best_of"]["maximum"]) == (1, 128)
        assert "counts the tokens of all of them" in first["best_of"]["description"]
        assert (first["cache_salt"]["minLength"], first["cache_salt"]["maxLength"]) == (1, 256)
        assert first["use_beam_search"]["type"] == "boolean"
        assert (first["length_penalty"]["minimum"], first["length_penalty"]["maximum"]) == (-5, 5)
        assert first["early_stopping"]["anyOf"] == [{"type": "boolean"}, {"enum": ["never"]}]
    for name in ("CompletionChoice", "ChatChoice"):
        assert schemas[name]["properties"]["cumulative_logprob"]["type"] == "number"
    text = json.dumps(document)
    references = {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}
    assert references <= set(schemas)
    assert {"CompletionReply", "ChatReply", "ErrorReply", "Model"} <= references
    for name in (
        "CompletionRequest",
        "ChatRequest",
        "ResponseRequest",
        "TokenizeRequest",
        "DetokenizeRequest",
    ):
        for field, schema in schemas[name]["properties"].items():
            assert_bounded(field, schema)
    endless = {operation.path for operation in OPERATIONS if operation.endless}
    for path, operations in document["paths"].items():
        for method in operations:
            filled = path.replace("{name}", "tiny").replace("{tier}/{block}", "device/0")
            asked = Exchange(service.app, method.upper(), filled).start()
            if path in endless:
                await asked.until_true(lambda asked=asked: asked.sent)
                asked.leave()
            reply = await asked.finish()
            # There is such a path, and it takes the method.
            empty = (200, 400 if path.startswith("/api/") else 415)
            assert reply.status in empty or reply.error["code"].endswith("_not_found"), path


def assert_bounded(field: str, schema: dict[str, Any]) -> None:
    """Every number, string and list says how large it may be."""
    for part in schema.get("anyOf", [schema]):
        kind = part.get("type")
        if kind in ("integer", "number"):
            assert "maximum" in part, field
        if kind == "string" and "enum" not in part:
            assert "maxLength" in part, field
        if kind == "array":
            assert "maxItems" in part, field
            assert_bounded(field, part["items"])
        if kind == "object" and "additionalProperties" in part:
            assert "maxProperties" in part, field
