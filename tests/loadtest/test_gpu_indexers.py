"""Prompts and steps of models that choose tokens, and of the same without an indexer, in miniature."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.engine.models.reading import read_model
from quire.loadtest import gpu_indexers
from quire.loadtest.gpu_indexers import Case, time_model
from quire.loadtest.model_configs import COMMON
from quire.loadtest.shape_configs import LATENT

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "vocab_size": 300,
    "dtype": "float32",
}
INDEXER = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 32}


def test_configurations_differ_by_their_indexer_alone(tmp_path: Path) -> None:
    shapes = []
    for name in LATENT:
        (tmp_path / "config.json").write_text(json.dumps({**COMMON, **LATENT[name]}))
        shape = read_model(tmp_path, "auto")
        shapes.append((shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.hidden_size))
    assert shapes[0] == shapes[1]
    first, second = (set(config) for config in LATENT.values())
    assert first - second == set(INDEXER) and not second - first


@pytest.mark.parametrize("name", LATENT)
def test_prompts_and_the_steps_behind_them_are_timed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    chooses = {key: value for key, value in INDEXER.items() if key in LATENT[name]}
    monkeypatch.setitem(LATENT, name, {**LATENT[name], **SMALL, **chooses})
    monkeypatch.setattr(gpu_indexers, "CHUNK", 32)
    monkeypatch.setattr(gpu_indexers, "STEPS", 4)
    monkeypatch.setattr(gpu_indexers, "SHORT", 40)
    timings, beside = time_model(name, [Case(1, 20), Case(3, 50)], Case(2, 40))
    assert [(each.model, each.rows, each.tokens) for each in timings] == [(name, 1, 20), (name, 3, 50)]
    assert all(each.prefill_s > 0 and each.step_ms > 0 for each in timings)
    assert (beside.rows, beside.tokens, beside.short) == (2, 40, 40) and beside.ms > 0
    assert beside.steps >= 2, "a chunk of 32 tokens holds no prompt of 40"
