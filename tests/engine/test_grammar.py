"""Constrained sequences on a tiny real model: what comes is what was asked for, whatever runs beside it."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import Output, Request, SamplingParams
from quire.engine.parallel.leader import LeadingRunner
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.startup import start_engine
from tests.service import tiny_tokenizers

VOCAB_SIZE = 400  # more than the tokenizer has
SCALAR: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -50, "maximum": 5000},
    {"type": "string", "maxLength": 6},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["grün", "blue", 7]},
    {"const": "你好 🙂"},
    {"type": "string", "pattern": "^[a-f]{2,4}(-[0-9]{3})?$"},
]
REGEXES = [
    r"[a-z]{3,8}@[a-z]{2,5}\.(org|net)",
    r"([0-9]{1,3}\.){3}[0-9]{1,3}",
    r"[äöü日本]{1,5}",
    r"(ab|c+){2,4}x?",
]
OPTIONS = {"whitespace_pattern": " "}
PLAIN = ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over bytes."""
    tokenizer = tiny_tokenizers.byte_level()
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=[tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|user|>")],
        initializer_range=0.4,
    )
    path = tmp_path_factory.mktemp("bytes")
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def make_core(folder: Path, **settings: Any) -> EngineCore:
    defaults = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 200}
    return start_engine(EngineConfig(model=str(folder), **{**defaults, **settings}))[0]


@pytest.fixture(scope="module")
def core(folder: Path) -> EngineCore:
    return make_core(folder)


def json_grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kind = rng.choice(["scalar", "object", "array", "any"]) if depth else "scalar"
    if kind == "object":
        names = rng.sample(["a", "name", "ü", 'q"', "x y"], rng.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }
    if kind == "array":
        most = rng.randint(1, 3)
        return {
            "type": "array",
            "items": random_schema(rng, depth - 1),
            "minItems": rng.randint(0, most),
            "maxItems": most,
        }
    if kind == "any":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    return rng.choice(SCALAR)


def run(core: EngineCore, requests: list[Request]) -> dict[tuple[int, int], list[Output]]:
    for request in requests:
        assert core.handle(request) == []
    outputs: dict[tuple[int, int], list[Output]] = {}
    while core.has_work:
        for output in core.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
        check_scheduler(core.scheduler.state)
    assert core.scheduler.blocks.pool.num_available == core.scheduler.blocks.pool.num_blocks
    return outputs


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def constrained(request_id: int, grammar: str, **params: Any) -> Request:
    rng = random.Random(request_id)
    prompt = [rng.randrange(200) for _ in range(rng.randint(1, 40))]
    given = {"temperature": 1.0, "max_tokens": 200, "seed": request_id, "grammar": grammar}
    return Request(request_id, prompt, SamplingParams(**{**given, **params}))


def text_of(tokenizer: Tokenizer, outputs: list[Output]) -> str:
    """Return the text of a sequence that ended by itself."""
    assert outputs[-1].finish_reason == "stop"
    *tokens, end = tokens_of(outputs)
    assert end == outputs[-1].stop_token
    return tokenizer.decode(tokens, skip_special_tokens=False)


def test_every_text_is_what_its_schema_or_regex_says(core: EngineCore, tokenizer: Tokenizer) -> None:
    rng = random.Random(4)
    schemas = [random_schema(rng) for _ in range(40)]
    temperatures = [rng.choice([0.0, 0.7, 2.0]) for _ in schemas]
    requests = [
        constrained(i, json_grammar(schema), temperature=temperature, n=rng.choice([1, 3]), top_p=0.9)
        for i, (schema, temperature) in enumerate(zip(schemas, temperatures, strict=True))
    ]
    for (i, _), outputs in run(core, requests).items():
        jsonschema.validate(json.loads(text_of(tokenizer, outputs)), schemas[i])
    patterns = [LLMatcher.grammar_from_regex(regex) for regex in REGEXES]
    matched = run(core, [constrained(i, patterns[i % len(patterns)], n=2) for i in range(12)])
    for (i, _), outputs in matched.items():
        text = text_of(tokenizer, outputs)
        assert re.fullmatch(REGEXES[i % len(REGEXES)], text), text
    assert len({tuple(tokens_of(outputs)) for outputs in matched.values()}) > 12, "samples differ"


def mixture() -> list[Request]:
    """Constrained requests of all kinds, and others between them."""
    rng = random.Random(9)
    kinds: list[tuple[str, dict[str, Any]]] = [
        (json_grammar(random_schema(rng)), {}),
        (PLAIN, {"ignore_eos": True, "max_tokens": 30}),
        (
            LLMatcher.grammar_from_regex("[a-z]{10,60}"),
            {"n": 3, "logprobs": 2, "top_k": 40, "max_tokens": 80},
        ),
        (PLAIN, {"temperature": 0.0, "ignore_eos": True, "max_tokens": 20, "logit_bias": {7: 5.0}}),
        (LLMatcher.grammar_from_regex("[0-9 ]{20,50}"), {"presence_penalty": 1.0, "prompt_logprobs": 1}),
        (json_grammar(random_schema(rng)), {"n": 2, "max_tokens": 12, "min_tokens": 6}),
    ]
    return [
        constrained(i, grammar, **params) for i in range(18) for grammar, params in [kinds[i % len(kinds)]]
    ]


def test_tokens_depend_on_neither_batch_nor_memory(core: EngineCore, folder: Path) -> None:
    requests = mixture()
    alone: dict[tuple[int, int], list[int]] = {}
    for request in requests:
        alone |= {key: tokens_of(outputs) for key, outputs in run(core, [request]).items()}
    together = run(core, requests)
    assert {key: tokens_of(outputs) for key, outputs in together.items()} == alone
    for mode in ("recompute", "swap"):
        pressed = make_core(folder, num_gpu_blocks_override=20, preemption_mode=mode)
        assert {key: tokens_of(outputs) for key, outputs in run(pressed, requests).items()} == alone
        preemption = pressed.scheduler.preemption
        assert (preemption.recomputes > 0, preemption.swaps > 0) == (mode == "recompute", mode == "swap")
    entries = [entry for output in together[2, 0] for entry in output.logprobs or []]
    assert any(entry.rank > 1 for entry in entries), "log-probabilities are of the raw logits"


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on GPUs need two of them")
def test_ranks_with_parts_of_the_vocabulary_give_what_one_gives(core: EngineCore, folder: Path) -> None:
    divided = make_core(folder, tensor_parallel_size=2)
    assert isinstance(divided.runner, LeadingRunner)
    try:
        expected, got = (run(each, mixture()[:6]) for each in (core, divided))
    finally:
        divided.runner.leader.close()
    assert {key: tokens_of(outputs) for key, outputs in got.items()} == {
        key: tokens_of(outputs) for key, outputs in expected.items()
    }


def test_a_grammar_ends_it_and_min_tokens_only_where_it_can_go_on(core: EngineCore) -> None:
    """And max_tokens cuts it."""
    outputs = run(
        core,
        [
            constrained(0, LLMatcher.grammar_from_regex("abc"), min_tokens=20),
            constrained(1, LLMatcher.grammar_from_regex("[a-z]*"), min_tokens=20, max_tokens=40),
            constrained(2, LLMatcher.grammar_from_regex("[a-z]{50,}"), max_tokens=8),
        ],
    )
    assert outputs[0, 0][-1].finish_reason == "stop" and len(tokens_of(outputs[0, 0])) <= 4
    assert len(tokens_of(outputs[1, 0])) > 20
    assert outputs[2, 0][-1].finish_reason == "length" and len(tokens_of(outputs[2, 0])) == 8


def test_what_cannot_be_followed_ends_its_own_request(core: EngineCore, tokenizer: Tokenizer) -> None:
    """A grammar that is none, one without a beginning, and one that grows beyond its limits on the way."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}}
    later = json_grammar({"type": "array", "prefixItems": [{"const": 12345}, wide], "minItems": 2})
    beside = LLMatcher.grammar_from_regex("[a-z]{5}")
    outputs = run(
        core,
        [
            constrained(0, LLMatcher.grammar_from_regex("(")),
            constrained(1, json_grammar({"type": "string", "format": "no such"}), n=2),
            constrained(2, later),
            constrained(3, beside, n=4),
        ],
    )
    for key, words in [((0, 0), "regex"), ((1, 1), "Unknown format"), ((2, 0), "cannot be followed")]:
        assert outputs[key][-1].finish_reason == "error"
        assert words in str(outputs[key][-1].error)
    for index in range(4):
        assert re.fullmatch("[a-z]{5}", text_of(tokenizer, outputs[3, index]))


def test_aborts_while_a_grammar_is_compiled_and_after(core: EngineCore) -> None:
    grammar = LLMatcher.grammar_from_regex("[a-z]{20,30}[0-9]")
    for steps in range(6):
        core.add(constrained(0, grammar.replace("20", str(20 - steps)), n=3))
        for _ in range(steps):
            core.step()
        core.abort(0)
        assert run(core, []) == {} or steps
    assert not core.has_work


def test_refused_by_name(core: EngineCore, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^ignore_eos "):
        SamplingParams(grammar="x", ignore_eos=True)
    with pytest.raises(ValueError, match=r"^grammar "):
        SamplingParams(grammar="x", beam_width=2, temperature=0.0)
    shutil.copytree(folder, tmp_path / "without")
    (tmp_path / "without" / "tokenizer.json").unlink()
    plain, info = start_engine(EngineConfig(model=str(tmp_path / "without"), num_gpu_blocks_override=20))
    assert not info.has_grammars
    with pytest.raises(ValueError, match=r"^grammar: .*no tokenizer"):
        plain.add(constrained(0, LLMatcher.grammar_from_regex("a")))
