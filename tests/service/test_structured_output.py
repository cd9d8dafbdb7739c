"""`response_format` and `guided_*`: what is refused, who compiles it, and what openai's client gets."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import httpx
import jsonschema
import numpy as np
import openai
import pytest
from llguidance import LLMatcher
from pydantic import BaseModel, Field

from quire.engine.sequences.grammar import Grammars, load_vocabulary
from quire.service.api.openapi import describe
from quire.service.text import grammar_trials
from quire.service.text import worker_pool as workers
from quire.service.text.grammar_compiler import trial
from quire.service.text.grammar_trials import GrammarTrials
from quire.service.text.structured import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, json_grammar, regex_grammar
from quire.service.text.tokenizer import Tokenizer
from tests.engine.toy_grammar import deep_rules
from tests.server_process import serving
from tests.service import tiny_tokenizers
from tests.service.asgi import exchange, post
from tests.service.conftest import Service
from tests.service.grammar_texts import accepts_grammar

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "hello"}]
ASKED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": MESSAGES},
    RESPONSES: {"input": "hello"},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 30},
        "score": {"type": "integer", "minimum": 0, "maximum": 10},
        "tags": {"type": "array", "items": {"enum": ["kv", "gpu"]}, "maxItems": 3},
    },
    "required": ["answer", "score", "tags"],
    "additionalProperties": False,
}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def flat_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "name": "answer", "schema": schema}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
CHOICE = {"guided_choice": ["a", "b"]}
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    (COMPLETIONS, "guided_regex", {"guided_regex": "("}, "regex"),
    (COMPLETIONS, "guided_regex", {"guided_regex": r"(?=a)b"}, "look-around"),
    (COMPLETIONS, "guided_regex", {"guided_regex": "x" * 8193}, "8192"),
    (COMPLETIONS, "guided_regex", {"guided_regex": "(a{1000}){1000}"}, "too many expressions"),
    (COMPLETIONS, "guided_regex", {"guided_regex": "(hello |world ){2}(a{1000}){1000}"}, "followed"),
    (COMPLETIONS, "guided_choice", {"guided_choice": []}, "length >= 1"),
    (COMPLETIONS, "guided_choice", {**CHOICE, "guided_regex": "a"}, "together with guided_regex"),
    (COMPLETIONS, "guided_json", {"guided_json": "{"}, "truncated"),
    (COMPLETIONS, "guided_json", {"guided_json": "[1]"}, "object"),
    (COMPLETIONS, "guided_json", {"guided_json": {"type": "strin"}}, "strin"),
    (COMPLETIONS, "guided_json", {"guided_json": {"not": {}}}, "not"),
    (COMPLETIONS, "guided_json", {"guided_json": {"type": "integer", "minimum": 3, "maximum": 2}}, "minimum"),
    (COMPLETIONS, "guided_json", {"guided_json": {"$ref": "http://127.0.0.1/schema"}}, "is fetched"),
    (COMPLETIONS, "guided_json", {"guided_json": {"$ref": "#/$defs/b"}}, "'#/$defs/b'"),
    (COMPLETIONS, "guided_json", {"guided_json": LOOP}, "$ref refers only to itself"),
    (COMPLETIONS, "guided_json", {"guided_json": {"oneOf": [{}, {"minimum": 3}]}}, "make it anyOf"),
    (COMPLETIONS, "guided_json", {"guided_json": {"pattern": "a 1 | b("}}, "a 1 | b("),
    (COMPLETIONS, "guided_json", {"guided_json": {"const": "x" * MAX_SCHEMA_BYTES}}, str(MAX_SCHEMA_BYTES)),
    (COMPLETIONS, "guided_json", {"guided_json": deep(MAX_SCHEMA_DEPTH)}, str(MAX_SCHEMA_DEPTH)),
    (COMPLETIONS, "structured_outputs", {"structured_outputs": {"grammar": deep_rules(4000)}}, "too deep"),
    (COMPLETIONS, "ignore_eos", {**CHOICE, "ignore_eos": True}, "guided_choice"),
    (COMPLETIONS, "use_beam_search", {**CHOICE, "use_beam_search": True}, "guided_choice"),
    (COMPLETIONS, "response_format", {"response_format": {"type": "json_object"}}, "not supported"),
    (CHAT, "response_format.type", {"response_format": {"type": "yaml"}}, "yaml"),
    (CHAT, "response_format.json_schema", {"response_format": {"type": "json_schema"}}, "missing"),
    (CHAT, "response_format", {"response_format": json_schema({"if": {}})}, "if"),
    (CHAT, "response_format", {"response_format": json_schema(deep(MAX_SCHEMA_DEPTH))}, "levels"),
    (RESPONSES, "text.format.type", {"text": {"format": {"type": "yaml"}}}, "yaml"),
    (RESPONSES, "text.format", {"text": {"format": flat_schema({"if": {}})}}, "if"),
    (RESPONSES, "text.format", {"text": {"format": flat_schema(deep(MAX_SCHEMA_DEPTH))}}, "levels"),
    (
        RESPONSES,
        "ignore_eos",
        {"text": {"format": {"type": "json_object"}}, "ignore_eos": True},
        "text.format",
    ),
    (CHAT, "guided_choice", {**CHOICE, "response_format": {"type": "json_object"}}, "response_format"),
]


@pytest.mark.anyio
async def test_refusals_name_the_field(service: Service) -> None:
    for path, param, fields, words in REFUSED:
        reply = await post(service.app, path, {**ASKED[path], **fields})
        assert (reply.status, reply.error["param"]) == (400, param), fields
        assert words in reply.error["message"], reply.error
        for inner in ("%json", "x-guidance", "option", "NoExtensionBias"):
            assert inner not in reply.error["message"], "what nobody wrote, or can set"
    assert service.engine.streams == []


@pytest.mark.anyio
async def test_keywords_that_json_schema_does_not_have_are_ignored_as_is_told(service: Service) -> None:
    for schema, status in (({"type": "string", "maxLenght": 3}, 200), ({"uniqueItems": True}, 400)):
        reply = await post(service.app, COMPLETIONS, {"prompt": "x", "guided_json": schema})
        assert reply.status == status
    schemas = describe("1")["components"]["schemas"]
    told = json.dumps(schemas["CompletionRequest"]["properties"]["guided_json"])
    assert "One that JSON Schema does not have, a misspelt one too, is ignored" in told


def test_formats_that_json_schema_does_not_have_limit_nothing(tokenizer: Tokenizer) -> None:
    """Those that can be enforced are, and what only looks like a format is none."""
    day: dict[str, Any] = {"type": "string", "format": "date"}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "format": {"anyOf": [{"type": "string", "format": "path"}]},
            "days": {"type": "array", "items": day},
            "const": {"type": "string", "format": "password", "maxLength": 3},
            "enum": {"enum": [{"format": "b"}]},
        },
        "required": ["format", "days", "const", "enum"],
    }
    grammar = json_grammar(schema)
    good = {"format": "/x", "days": ["2026-01-31"], "const": "a/b", "enum": {"format": "b"}}
    assert accepts_grammar(tokenizer, grammar, json.dumps(good))
    for wrong in ({"format": 3}, {"days": ["no day"]}, {"const": "long"}, {"enum": {}}):
        assert not accepts_grammar(tokenizer, grammar, json.dumps(good | wrong)), wrong


@pytest.mark.anyio
async def test_the_engine_gets_the_grammar(service: Service) -> None:
    fields: list[dict[str, Any]] = [
        {"guided_regex": "a+/b"},
        {"guided_choice": ['a "b"', "c\n|d"]},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"response_format": {"type": "json_object"}},
        {"response_format": json_schema(SCHEMA)},
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None},
    ]
    for given in fields:
        assert (await post(service.app, CHAT, {"messages": MESSAGES, "n": 2, **given})).status == 200
    for asked in (flat_schema(SCHEMA), {"type": "json_object"}):
        body = {"input": "hello", "text": {"format": asked}}
        assert (await post(service.app, RESPONSES, body)).json()["text"]["format"]["type"] == asked["type"]
    grammars = [stream.params.grammar for stream in service.engine.streams]
    assert grammars[-2:] == [grammars[5], grammars[4]]
    assert grammars[2] == grammars[3] == grammars[5]
    assert len(set(grammars)) == 5 and grammars[6:8] == ["", ""]


@pytest.mark.anyio
async def test_a_model_without_grammars_refuses_them(service: Service) -> None:
    service.engine.info = None
    info = service.engine._info
    service.engine.info = type(info)(
        **{name: getattr(info, name) for name in info.__struct_fields__} | {"has_grammars": False}
    )
    reply = await post(service.app, CHAT, {"messages": MESSAGES, **CHOICE})
    assert (reply.status, reply.error["param"]) == (400, "guided_choice")
    assert "no tokenizer" in reply.error["message"]


@pytest.mark.anyio
async def test_what_takes_too_long_is_refused_and_the_next_is_compiled(service: Service) -> None:
    service.state.grammar_trials = GrammarTrials(seconds=0.05)
    asked = {"prompt": "x", "guided_regex": "a"}
    assert (await post(service.app, COMPLETIONS, asked)).status == 200
    for _ in range(2):
        reply = await post(service.app, COMPLETIONS, {**asked, "guided_regex": "(a{1000}){1000}"})
        assert (reply.status, reply.error["param"]) == (400, "guided_regex")
        assert "longer than 0.05 seconds" in reply.error["message"]
        assert (await post(service.app, COMPLETIONS, asked)).status == 200, "remembered"
    assert (await post(service.app, COMPLETIONS, {**asked, "guided_regex": "b"})).status == 200


@pytest.mark.anyio
async def test_an_accident_is_no_verdict(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it compiles, or before it could: tried again, told as 503, and not remembered."""
    asked = {"prompt": "x", "guided_regex": "a"}
    ask = workers._Process.ask

    async def ask_and_die(process: workers._Process, question: bytes) -> bytes:
        process.kill()
        return await ask(process, question)

    with monkeypatch.context() as patch:
        patch.setattr(workers._Process, "ask", ask_and_die)
        reply = await post(service.app, COMPLETIONS, asked)
        assert reply.status == 503 and int(reply.headers["retry-after"]) >= 1
        assert reply.error["code"] == "worker_lost"
    with monkeypatch.context() as patch:
        patch.setattr(workers, "START_SECONDS", 0.0)
        assert (await post(service.app, COMPLETIONS, asked)).status == 503
    assert (await post(service.app, COMPLETIONS, asked)).status == 200
    for process in service.state.grammar_trials._workers._started:
        process.kill()  # while it is idle: the first try meets it
    assert (await post(service.app, COMPLETIONS, {**asked, "guided_regex": "b"})).status == 200


@pytest.mark.anyio
async def test_only_so_many_wait_to_be_compiled(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trials, "MAX_WAITING", 3)
    asked = [
        exchange(service.app, COMPLETIONS, {"prompt": "x", "max_tokens": 1, "guided_regex": "a" * (1 + at)})
        for at in range(5)
    ]
    statuses = [(await each.finish()).status for each in asked]
    assert sorted(statuses) == [200, 200, 200, 429, 429]


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
def test_every_kind_of_vocabulary_spells_what_is_asked(kind: str) -> None:
    """What the grammar reads in its tokens is what the client reads."""
    backend = getattr(tiny_tokenizers, kind)()
    tokenizer = Tokenizer(backend)
    eos = backend.token_to_id("</s>") or backend.token_to_id("<|end|>")
    vocabulary = load_vocabulary(tokenizer.to_json(), 600, (eos,))
    schema = {
        "type": "object",
        "properties": {"a ü": {"type": "string", "maxLength": 6}},
        "required": ["a ü"],
    }
    grammar = json_grammar(schema | {"additionalProperties": False})
    assert trial(Grammars(lambda: vocabulary), grammar) is None
    for seed in range(5):
        rng = random.Random(seed)
        matcher, tokens = LLMatcher(vocabulary, grammar, log_level=0), list[int]()
        while not matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            tokens.append(rng.choice(np.flatnonzero(bits).tolist()))
            assert matcher.consume_token(tokens[-1])
        detokenizer = tokenizer.detokenizer([], skip_special_tokens=True)
        jsonschema.validate(json.loads(detokenizer.push(tokens) + detokenizer.finish()), schema)


def test_tokens_that_a_tokenizer_has_and_a_model_has_not_are_never_allowed() -> None:
    """As of a model that was trained further with a token for padding more."""
    backend = tiny_tokenizers.byte_level()
    eos, size = backend.token_to_id("<|end|>"), backend.get_vocab_size()
    backend.add_special_tokens(["<|pad|>"])
    backend.add_tokens(["added later"])
    grammars = Grammars(lambda: load_vocabulary(backend.to_str(), size, (eos,)))
    added, letters = regex_grammar("added later|a"), regex_grammar("[a-z ]+")
    assert trial(grammars, added) is None
    mask = grammars.compile(letters).mask
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert len(allowed) and allowed.max() < size
    assert backend.token_to_id("plain added") in allowed


def test_a_vocabulary_that_cannot_be_followed_is_no_crash() -> None:
    backend = tiny_tokenizers.wordpiece()
    grammars = Grammars(lambda: load_vocabulary(backend.to_str(), 600, (0,)))
    assert "decoder" in str(trial(grammars, json_grammar({"type": "object"})))


# -- a real model -----------------------------------------------------------------------------------------


class Verdict(BaseModel):
    summary: str = Field(max_length=30)
    grade: Literal["good", "bad"]
    points: list[Annotated[int, Field(ge=0, le=99)]] = Field(max_length=2)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--swap-space", "0") as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_parses_its_model(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is a KV cache?"}]
    reply = client.chat.completions.parse(
        model="quire-demo", messages=messages, response_format=Verdict, seed=3, n=3
    )
    assert len(reply.choices) == 3
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Verdict)
    with client.chat.completions.stream(
        model="quire-demo", messages=messages, response_format=Verdict, seed=3, n=1
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == reply.choices[0].message.parsed


def test_openai_parses_its_model_in_a_response(client: openai.OpenAI) -> None:
    reply = client.responses.parse(
        model="quire-demo", input="What is a KV cache?", text_format=Verdict, extra_body={"seed": 3}
    )
    assert isinstance(reply.output_parsed, Verdict)


def test_texts_are_as_asked(client: openai.OpenAI) -> None:
    def text(**asked: Any) -> str:
        reply = client.completions.create(
            model="quire-demo", prompt="A block", max_tokens=150, seed=1, extra_body=asked
        )
        assert reply.choices[0].finish_reason == "stop"
        return reply.choices[0].text

    choices = ['yes "sir"', "no\n", "vielleicht — 🙂"]
    assert text(guided_choice=choices) in choices
    assert re.fullmatch(r"[0-9]{2}:[0-9]{2} (am|pm)", text(guided_regex=r"[0-9]{2}:[0-9]{2} (am|pm)"))
    jsonschema.validate(json.loads(text(guided_json=SCHEMA)), SCHEMA)


def test_hostile_ones_are_refused_while_a_stream_goes_on(url: str, client: openai.OpenAI) -> None:
    hostile: list[dict[str, Any]] = [
        {"guided_json": {"allOf": [{"pattern": f"(.*a.{{{i}}})", "type": "string"} for i in range(5, 15)]}},
        {"guided_regex": "(" * 4000 + ")" * 4000},
        {"guided_json": LOOP},
    ]
    plain = client.completions.create(
        model="quire-demo", prompt="The", max_tokens=300, temperature=0, extra_body={"ignore_eos": True}
    )
    statuses: list[tuple[int, str | None]] = []
    first = threading.Event()

    def attack() -> None:
        first.wait(60)
        for fields in hostile:
            body = {"prompt": "x", "max_tokens": 1, **fields}
            reply = httpx.post(f"{url}{COMPLETIONS}", json=body, timeout=60)
            statuses.append((reply.status_code, reply.json().get("error", {}).get("param")))

    attacker = threading.Thread(target=attack)
    attacker.start()
    text = ""
    for chunk in client.completions.create(
        model="quire-demo",
        prompt="The",
        max_tokens=300,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    ):
        first.set()
        text += chunk.choices[0].text
    attacker.join()
    assert text == plain.choices[0].text
    assert statuses == [(400, next(iter(fields))) for fields in hostile]


def test_the_tokenizer_gives_itself_as_json(tokenizer: Tokenizer) -> None:
    assert json.loads(tokenizer.to_json())["model"]["type"] == "BPE"
