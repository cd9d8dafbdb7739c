"""Tools in chat: what is rendered, refused and enforced, and what openai's client gets of the calls."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
import torch
from llguidance import LLMatcher
from msgspec.structs import replace
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine.messages import SamplingParams
from quire.engine.sequences.grammar import Grammars, load_vocabulary
from quire.service.text.structured import lark_grammar
from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from quire.service.text.tools.formats import HERMES, LLAMA
from quire.service.text.tools.protocol import Function
from quire.service.text.tools.regions import RegionFormat
from tests.server_process import serving
from tests.service import tiny_tokenizers, tool_templates
from tests.service.asgi import post
from tests.service.conftest import Service
from tests.service.fake_engine import FakeEngine
from tests.service.grammar_texts import accepts, accepts_grammar
from tests.service.live import Live
from tests.service.test_tool_parser import hermes, llama, parse

PATH = "/v1/chat/completions"
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> Any:
    function = {"name": name, "description": f"Does {name}.", **more}
    return {
        "type": "function",
        "function": function | ({} if parameters is None else {"parameters": parameters}),
    }


TOOLS = [tool("get_weather", PARAMETERS), tool("f")]
QUESTION: Any = [{"role": "user", "content": "hello"}]
ARGUMENTS = '{"city": "Bär 🙂", "days": 3}'


def tokenizer_with(template: str, *, marker: str | None = None) -> Tokenizer:
    """`marker`: whether the markers of calls are tokens of their own, and of which kind."""
    backend = tiny_tokenizers.byte_level()
    if marker is not None:
        tokens = [AddedToken(text, special=marker == "special") for text in HERMES.markers]
        (backend.add_special_tokens if marker == "special" else backend.add_tokens)(tokens)
    return Tokenizer(backend, ChatTemplate(template, {}))


def make_room(engine: FakeEngine) -> None:
    """For prompts that describe tools, a token a byte."""
    engine._info = engine.info = replace(engine._info, max_model_len=4000, num_blocks=300)


@pytest.fixture
async def tool_service(make_service: Callable[..., Service]) -> AsyncIterator[Callable[..., Service]]:
    """An engine that says `text` and ends, behind a template of a kind."""
    made: list[Service] = []

    def make(text: str = "", template: str = tool_templates.HERMES, marker: str | None = None) -> Service:
        tokenizer = tokenizer_with(template, marker=marker)
        tokens = tokenizer.encode(text + "<|end|>", add_special_tokens=False)
        service = make_service(script=lambda prompt, params, index: tokens)
        service.state.tokenizer = tokenizer
        make_room(service.engine)
        made.append(service)
        return service

    yield make
    for service in made:
        await service.state.grammar_trials.close()


def merged(events: list[Any]) -> dict[str, Any]:
    """The message of choice 0 that a stream makes, as a client puts it together, and how it ended."""
    message: dict[str, Any] = {"role": None, "content": "", "tool_calls": []}
    for event in events[:-1]:
        (choice,) = event["choices"]
        delta = choice["delta"]
        message["role"] = message["role"] or delta["role"]
        message["content"] += delta["content"] or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert call["type"] == "function" and call["id"].startswith("call_")
                assert call["function"]["name"]
                message["tool_calls"].append(call["function"])
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


@pytest.mark.anyio
@pytest.mark.parametrize("marker", [None, "plain", "special"])
async def test_calls_streamed_and_not(tool_service: Callable[..., Service], marker: str | None) -> None:
    text = f"I look.\n{hermes('get_weather', ARGUMENTS)}\n{hermes('f', '{}')}"
    service = tool_service(text, marker=marker)
    body = {"messages": QUESTION, "tools": TOOLS}
    choice = (await post(service.app, PATH, body)).json()["choices"][0]
    message = choice["message"]
    assert (message["role"], message["content"], choice["finish_reason"]) == (
        "assistant",
        "I look.",
        "tool_calls",
    )
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": ARGUMENTS},
        {"name": "f", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    streamed = merged((await post(service.app, PATH, body | {"stream": True})).events)
    assert streamed == {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [call["function"] for call in message["tool_calls"]],
        "finish_reason": "tool_calls",
    }


@pytest.mark.anyio
async def test_llama_calls(tool_service: Callable[..., Service]) -> None:
    service = tool_service(llama("get_weather", ARGUMENTS), tool_templates.LLAMA)
    reply = await post(service.app, PATH, {"messages": QUESTION, "tools": TOOLS})
    choice = reply.json()["choices"][0]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}


@pytest.mark.anyio
async def test_one_call_ends_it_where_only_one_may_be_made(tool_service: Callable[..., Service]) -> None:
    service = tool_service(f"{hermes('f', '{}')}\n{hermes('f', '{}')}")
    body = {"messages": QUESTION, "tools": TOOLS, "parallel_tool_calls": False}
    choice = (await post(service.app, PATH, body)).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
    assert service.engine.streams[0].aborted


@pytest.mark.anyio
async def test_what_is_no_call_is_text(tool_service: Callable[..., Service]) -> None:
    text = hermes("unknown", "{}") + " <tool_ca"
    service = tool_service(text)
    for body in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {}):
        choice = (await post(service.app, PATH, {"messages": QUESTION, **body})).json()["choices"][0]
        assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
    known = tool_service(hermes("f", "{}"))
    choice = (await post(known.app, PATH, {"messages": QUESTION})).json()["choices"][0]
    assert choice["message"]["content"] == hermes("f", "{}")


@pytest.mark.anyio
async def test_a_length_or_a_stop_string_may_cut_a_call(tool_service: Callable[..., Service]) -> None:
    service = tool_service(hermes("get_weather", ARGUMENTS))
    tokens = service.engine.script([], SamplingParams(), 0)
    for more, reason in [({"max_tokens": len(tokens) - 30}, "length"), ({"stop": ['"days"']}, "stop")]:
        body = {"messages": QUESTION, "tools": TOOLS, **more}
        choice = (await post(service.app, PATH, body)).json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == reason
        assert ARGUMENTS.startswith(call["function"]["arguments"])
        streamed = merged((await post(service.app, PATH, body | {"stream": True})).events)
        assert streamed["tool_calls"] == [call["function"]]


@pytest.mark.anyio
@pytest.mark.parametrize("template", [tool_templates.HERMES, tool_templates.LLAMA])
async def test_templates_see_tools_calls_and_answers(
    tool_service: Callable[..., Service], template: str
) -> None:
    service = tool_service("ok", template)
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x":"ü"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    for more in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {}):
        reply = await post(service.app, PATH, {"messages": messages, **more})
        assert reply.status == 200
        assert service.state.tokenizer is not None
        prompt = service.state.tokenizer.decode(service.engine.streams[-1].prompt, skip_special_tokens=False)
        assert '{"x": "ü"}' in prompt and "sunny" in prompt
        assert ('"Does get_weather."' in prompt) == (more == {"tools": TOOLS})


def as_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


NUMBER = as_format({"type": "integer"})
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("tools", {"tools": [tool("f"), tool("f")]}, "two functions named 'f'"),
    ("tools", {"tools": [tool("f", {"type": "string"})]}, "type object"),
    ("tools[0].function.name", {"tools": [tool("a b")]}, "regex"),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}, "web_search"),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "'g'"),
    ("tool_choice", {"tools": TOOLS, "tool_choice": "any"}, "any"),
    ("tool_choice", {"tool_choice": "required"}, "tools"),
    ("guided_regex", {"tools": TOOLS, "guided_regex": "a"}, "tools"),
    ("guided_regex", {"tools": TOOLS, "response_format": NUMBER, "guided_regex": "a"}, "tools"),
    ("response_format", {"tools": TOOLS, "response_format": as_format({"not": {}})}, "not"),
    ("use_beam_search", {"tools": TOOLS, "use_beam_search": True}, "tools"),
    (
        "tools",
        {
            "tools": [tool("f", {"type": "object", "properties": {"a": {"not": {}}}})],
            "tool_choice": "required",
        },
        "not",
    ),
    ("messages[0]", {"messages": [{"role": "user"}]}, "content"),
    ("messages[0]", {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "tool_calls"),
    ("messages[0]", {"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
    ("messages[0]", {"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "tool_call_id"),
    (
        "messages[1].tool_call_id",
        {
            "messages": [
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "b", "content": "x"},
            ]
        },
        "'b'",
    ),
]


@pytest.mark.anyio
async def test_refusals_name_the_field(tool_service: Callable[..., Service], service: Service) -> None:
    hermes_service = tool_service("x")
    for param, fields, words in REFUSED:
        reply = await post(hermes_service.app, PATH, {"messages": QUESTION, **fields})
        assert (reply.status, reply.error["param"]) == (400, param), (fields, reply.error)
        assert words in reply.error["message"], reply.error
    reply = await post(service.app, PATH, {"messages": QUESTION, "tools": TOOLS})
    assert (reply.status, reply.error["param"]) == (400, "tools"), "a template without tools"
    answered = [{"role": "assistant", "tool_calls": [CALL]}]
    reply = await post(service.app, PATH, {"messages": answered})
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert not hermes_service.engine.streams and not service.engine.streams


# -- a document, if it is no call ---------------------------------------------------------------------------

ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"type": "string"}},
    "required": ["answer"],
    "additionalProperties": False,
}
FLAT: Any = [{"type": "function", **each["function"], "strict": False} for each in TOOLS]
OWN: Any = [
    {"name": each["function"]["name"], "input_schema": each["function"].get("parameters", {"type": "object"})}
    for each in TOOLS
]
BESIDE_TOOLS: list[tuple[str, dict[str, Any], Callable[[Any], str]]] = [
    (
        PATH,
        {"messages": QUESTION, "tools": TOOLS, "response_format": as_format(ANSWER)},
        lambda reply: reply["choices"][0]["message"]["content"],
    ),
    (
        "/v1/responses",
        {
            "input": "hello",
            "tools": FLAT,
            "text": {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER}},
        },
        lambda reply: reply["output"][0]["content"][0]["text"],
    ),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 900,
            "messages": QUESTION,
            "tools": OWN,
            "output_config": {"format": {"type": "json_schema", "schema": ANSWER}},
        },
        lambda reply: reply["content"][0]["text"],
    ),
    (
        "/api/chat",
        {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "format": ANSWER, "stream": False},
        lambda reply: reply["message"]["content"],
    ),
]


@pytest.mark.anyio
@pytest.mark.parametrize("template", [tool_templates.HERMES, tool_templates.LLAMA])
async def test_an_answer_is_calls_or_a_document_in_every_api(
    tool_service: Callable[..., Service], template: str
) -> None:
    said = json.dumps({"answer": f" {hermes('f', '{}')} "})
    service = tool_service(said, template)
    call = (hermes if template is tool_templates.HERMES else llama)("get_weather", ARGUMENTS)
    for path, body, text_of in BESIDE_TOOLS:
        reply = await post(service.app, path, body)
        assert reply.status == 200, reply.body
        assert text_of(reply.json()) == said, path
        grammar, tokenizer = service.engine.streams[-1].params.grammar, service.state.tokenizer
        assert tokenizer is not None
        for text, allowed in ((said, True), (call, True), (f"I look.\n{call}", False), ("{}", False)):
            assert accepts_grammar(tokenizer, grammar, text) is allowed, (path, text)


@pytest.mark.anyio
async def test_a_document_beside_tools_streamed_and_not(tool_service: Callable[..., Service]) -> None:
    body = {"messages": QUESTION, "tools": TOOLS, "response_format": {"type": "json_object"}}
    said = json.dumps({"answer": hermes("f", "{}")})
    for text, content, calls in (
        (said, said, []),
        (hermes("f", "{}"), "", [{"name": "f", "arguments": "{}"}]),
    ):
        for marker in (None, "special"):
            service = tool_service(text, marker=marker)
            choice = (await post(service.app, PATH, body)).json()["choices"][0]
            streamed = merged((await post(service.app, PATH, body | {"stream": True})).events)
            called = [call["function"] for call in choice["message"].get("tool_calls", [])]
            assert (choice["message"]["content"] or "", called) == (content, calls)
            assert (streamed["content"], streamed["tool_calls"]) == (content, calls)
            assert choice["finish_reason"] == streamed["finish_reason"] == ("tool_calls" if calls else "stop")


@pytest.mark.anyio
async def test_the_choice_of_tools_decides_whether_a_document_may_come(
    tool_service: Callable[..., Service],
) -> None:
    service = tool_service("x")
    body = {"messages": QUESTION, "tools": TOOLS, "response_format": NUMBER}
    named = {"type": "function", "function": {"name": "f"}}
    for choice, calls, document in (
        ("none", False, True),
        ("auto", True, True),
        ("required", True, False),
        (named, True, False),
    ):
        assert (await post(service.app, PATH, body | {"tool_choice": choice})).status == 200
        grammar, tokenizer = service.engine.streams[-1].params.grammar, service.state.tokenizer
        assert tokenizer is not None
        assert accepts_grammar(tokenizer, grammar, hermes("f", "{}")) is calls
        assert accepts_grammar(tokenizer, grammar, "17") is document


@pytest.mark.anyio
async def test_a_document_that_may_read_as_a_call_is_refused(tool_service: Callable[..., Service]) -> None:
    """Where calls are bare objects."""
    service = tool_service('{"name": "f"}', tool_templates.LLAMA)
    text = {"type": "string"}
    closed = {"type": "object", "properties": {"name": text}, "additionalProperties": False}
    open_ = {"type": "object", "properties": {"answer": text}, "required": ["answer"]}
    parameters = closed | {"properties": {"name": text, "parameters": {"type": "object"}}}
    for schema, status in (
        (closed, 200),
        (open_, 200),
        ({"type": "object"}, 400),
        ({"type": "integer"}, 400),
        (parameters, 400),
        (open_ | {"properties": {"name": text, "answer": text}}, 400),
        (open_ | {"required": []}, 400),
        (open_ | {"allOf": [closed]}, 400),
        (closed | {"properties": 3}, 400),
    ):
        body = {"messages": QUESTION, "tools": TOOLS, "response_format": as_format(schema)}
        reply = await post(service.app, PATH, body)
        assert reply.status == status, (schema, reply.body)
        if status == 400:
            assert reply.error["param"] == "response_format" and "'parameters'" in reply.error["message"]
        else:
            assert reply.json()["choices"][0]["message"]["content"] == '{"name": "f"}'


# -- grammars -----------------------------------------------------------------------------------------------


def random_text(tokenizer: Tokenizer, grammar: str, rng: random.Random, limit: int = 250) -> str | None:
    """Tokens drawn from what the grammar allows; None if they come to no end."""
    eos = tokenizer.encode("<|end|>", add_special_tokens=False)[0]
    vocabulary = load_vocabulary(tokenizer.to_json(), 320, (eos,))
    Grammars(lambda: vocabulary).compile(grammar)
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    tokens: list[int] = []
    while len(tokens) < limit:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        if eos in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return tokenizer.decode(tokens, skip_special_tokens=False)
        tokens.append(rng.choice([token for token in allowed if token != eos]))
        assert matcher.consume_token(tokens[-1])
    return None


FUNCTIONS = [Function(name="get_weather", parameters=PARAMETERS), Function(name="f")]
SCHEMAS = {function.name: function.schema for function in FUNCTIONS}


@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=["hermes", "llama"])
@pytest.mark.parametrize("marker", [None, "special"])
def test_what_must_be_called_is_and_its_arguments_fit(form: RegionFormat, marker: str | None) -> None:
    tokenizer = tokenizer_with(tool_templates.HERMES, marker=marker)
    rng = random.Random(5)
    most = 0
    for parallel in (True, False):
        rules = form.must_call(FUNCTIONS, tokenizer.added_token, parallel=parallel)
        for _ in range(6):
            text = random_text(tokenizer, lark_grammar(rules), rng)
            if text is None:
                continue
            content, calls = parse(form, [text])
            assert content == "" and len(calls) >= 1 and (parallel or len(calls) == 1)
            most = max(most, len(calls))
            for name, arguments in calls:
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert most > 1


@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=["hermes", "llama"])
@pytest.mark.parametrize("marker", [None, "plain"])
def test_strict_arguments_fit_and_text_is_free(form: RegionFormat, marker: str | None) -> None:
    tokenizer = tokenizer_with(tool_templates.HERMES, marker=marker)
    write = hermes if form is HERMES else llama
    strict = [Function(name="get_weather", parameters=PARAMETERS, strict=True), Function(name="f")]
    rules = form.may_call(strict, tokenizer.added_token, parallel=True)
    good = write("get_weather", ARGUMENTS)
    free = write("f", '{"any": [1]}')
    for text in ["", "any text } at all\n<tool", good, good + form.between + free]:
        assert accepts(tokenizer, rules, text), text
    if form is HERMES:
        assert accepts(tokenizer, rules, f"I look.\n{good}\nDone.")
    for wrong in ['{"city": 3}', "{}", '{"city": "x", "more": 1}']:
        assert not accepts(tokenizer, rules, write("get_weather", wrong))
    assert not accepts(tokenizer, rules, write("unknown", "{}"))
    once = form.may_call(strict, tokenizer.added_token, parallel=False)
    assert accepts(tokenizer, once, good)
    assert not accepts(tokenizer, once, f"{good}{form.between}{good}")


# -- openai's client ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talker() -> Iterator[openai.OpenAI]:
    """A server whose model says one thing, with a call in it."""
    tokenizer = tokenizer_with(tool_templates.HERMES)
    tokens = tokenizer.encode(f"I look. {hermes('get_weather', ARGUMENTS)}<|end|>", add_special_tokens=False)
    server = Live(tokenizer, script=lambda prompt, params, index: tokens)
    make_room(server.engine)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    assert server.end() == 0


def test_openai_client(talker: openai.OpenAI) -> None:
    completions = talker.chat.completions
    message = completions.create(model="tiny", messages=QUESTION, tools=TOOLS).choices[0].message
    assert message.tool_calls is not None and message.tool_calls[0].type == "function"
    assert message.tool_calls[0].function.arguments == ARGUMENTS
    with completions.stream(model="tiny", messages=QUESTION, tools=TOOLS) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert len(pieces) > 3 and "".join(piece.arguments_delta for piece in pieces) == ARGUMENTS
    assert final.finish_reason == "tool_calls" and final.message.content == "I look."
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.arguments == ARGUMENTS
    answer: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    again: Any = [*QUESTION, message, answer]
    assert (
        completions.create(model="tiny", messages=again, tools=TOOLS).choices[0].finish_reason == "tool_calls"
    )


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It has learnt nothing, and its template is Hermes's."""
    backend = tiny_tokenizers.byte_level()
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        eos_token_id=backend.token_to_id("<|end|>"),
        initializer_range=0.4,
    )
    folder = tmp_path_factory.mktemp("random")
    LlamaForCausalLM(config).save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(tool_templates.HERMES)
    return folder


def test_a_random_model_calls_what_it_must(random_model: Path) -> None:
    with (
        serving(str(random_model), "--served-model-name", "random") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked: dict[str, Any] = {"model": "random", "messages": QUESTION, "tools": TOOLS, "max_tokens": 160}
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        reply = client.chat.completions.create(**asked, tool_choice=named, n=2, seed=1)
        for choice in reply.choices:
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            assert choice.message.tool_calls is not None
            (call,) = choice.message.tool_calls
            assert call.type == "function" and call.function.name == "get_weather"
            jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
        required = client.chat.completions.create(
            **asked, tool_choice="required", parallel_tool_calls=False, seed=2
        )
        assert required.choices[0].finish_reason == "tool_calls"
        flat: Any = [{"type": "function", **each["function"]} for each in TOOLS]
        response = client.responses.create(
            model="random",
            input="hello",
            tools=flat,
            tool_choice={"type": "function", "name": "get_weather"},
            max_output_tokens=160,
            extra_body={"seed": 1},
        )
        (item,) = response.output
        assert item.type == "function_call" and item.name == "get_weather"
        jsonschema.validate(json.loads(item.arguments), PARAMETERS)
