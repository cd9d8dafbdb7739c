"""A step of which only each row's newest token is wanted: as if all were, and the last layer does no more."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.models.config import ModelConfig
from quire.engine.models.loader import Model, load_model
from quire.engine.models.native_config import read_native
from quire.engine.models.pre_norm import GatedMLP, PreNormLayer
from quire.kernels.backend import torch_backend
from quire.kernels.formats.kv_format import FP8, FP12, FP32, KVFormat
from tests.models.paged_driver import PagedDriver
from tests.models.tiny_models import MODELS
from tests.models.watched import Watched

ROWS = 6
MAX_LEN = 100


def load(folder: Path) -> tuple[Model, ModelConfig]:
    config = read_native(folder)
    model, _ = load_model(
        folder, config, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=MAX_LEN
    )
    return model, config


Step = tuple[dict[int, int], dict[int, list[int]], int]


def steps(seed: str, vocab_size: int, count: int) -> list[Step]:
    """Decodes, chunks and how many rows pad: a row that has a context may decode, or take a chunk more."""
    rng = random.Random(seed)
    lengths = [0] * ROWS
    made: list[Step] = []
    for _ in range(count):
        decodes: dict[int, int] = {}
        chunks: dict[int, list[int]] = {}
        for row in rng.sample(range(ROWS), ROWS):
            kind = rng.choice(["decode", "chunk", "rest"])
            size = 1 if kind == "decode" else rng.randint(1, 20)
            if kind == "rest" or (kind == "decode" and not lengths[row]) or lengths[row] + size > MAX_LEN:
                continue
            ids = [rng.randrange(vocab_size) for _ in range(size)]
            if kind == "decode":
                decodes[row] = ids[0]
            else:
                chunks[row] = ids
            lengths[row] += size
        if decodes or chunks:
            made.append((decodes, chunks, rng.randint(0, 2)))
    return made


@pytest.mark.parametrize(
    ("name", "held"),
    [
        *((name, FP32) for name in MODELS),
        *((name, FP8) for name in ("qwen3", "mistral-window")),
        *((name, FP12) for name in ("llama3-sharded", "qwen2-late-window")),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_newest_tokens_get_what_they_get_among_all(
    name: str, held: KVFormat, model_folder: Callable[[str], Path]
) -> None:
    model, config = load(model_folder(name))
    all_tokens, newest = (PagedDriver(model, config, rows=ROWS, max_len=MAX_LEN, held=held) for _ in range(2))
    for step in steps(name, config.vocab_size, 16):
        expected, got = all_tokens.step(*step), newest.step_of_newest(*step)
        assert list(expected) == list(got)
        for row, logits in got.items():
            torch.testing.assert_close(logits, expected[row][-1], atol=1e-4, rtol=0)
        assert torch.equal(newest.cache.blocks, all_tokens.cache.blocks), "keys and values are all tokens'"


def watched_parts(layer: Any) -> tuple[list[Watched], dict[str, Any]]:
    """What computes past a layer's keys and values, and the layer's fields with it."""
    if isinstance(layer, PreNormLayer):
        assert isinstance(layer.mlp, GatedMLP)
        output, up, down = Watched(layer.output), Watched(layer.mlp.gate_up), Watched(layer.mlp.down)
        return [output, up, down], {"output": output, "mlp": GatedMLP(up, down)}  # type: ignore[arg-type]
    fields = {part: Watched(getattr(layer, part)) for part in ("output", "mlp_norm", "up", "down")}
    return [*fields.values()], fields


@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "opt", "opt-post-norm", "gpt2"])
def test_past_its_keys_and_values_the_last_layer_computes_newest_tokens_only(
    name: str, model_folder: Callable[[str], Path]
) -> None:
    model, config = load(model_folder(name))
    watched, fields = zip(*map(watched_parts, model.layers), strict=True)
    qkv = [Watched(layer.qkv) for layer in model.layers]
    model.layers = [
        replace(layer, qkv=first, **rest)
        for layer, first, rest in zip(model.layers, qkv, fields, strict=True)
    ]
    driver = PagedDriver(model, config, rows=ROWS, max_len=MAX_LEN)
    driver.step_of_newest({}, {0: [5, 6, 7], 1: [8] * 20})
    driver.step_of_newest({0: 9}, {1: [10] * 4, 2: [11] * 30})
    assert [each.counts for each in qkv] == [[23, 35]] * config.num_layers
    *before, last = watched
    assert all(part.counts == [23, 35] for layer in before for part in layer)
    assert all(part.counts == [2, 3] for part in last)
