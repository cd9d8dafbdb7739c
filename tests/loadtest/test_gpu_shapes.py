"""The grid of shapes: configurations that Quire reads as they are, and what a step of them has to read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.engine.models.reading import read_model
from quire.loadtest import gpu_shapes
from quire.loadtest.gpu_shapes import CONFIGS, Experts, time_model
from quire.loadtest.model_configs import COMMON

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 512,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_each_configuration_is_a_model_that_quire_reads(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **config}))
    model = read_model(tmp_path, "auto")
    assert (model.hidden_size, model.num_layers) == (config["hidden_size"], config["num_hidden_layers"])
    heads = (config["num_attention_heads"], config["num_key_value_heads"])
    assert (model.num_heads, model.num_kv_heads) == heads


def test_shapes_are_as_far_apart_as_the_grid_says() -> None:
    hidden = [config["hidden_size"] for config in CONFIGS.values()]
    groups = [config["num_attention_heads"] // config["num_key_value_heads"] for config in CONFIGS.values()]
    assert (min(hidden), max(hidden), min(groups), max(groups)) == (1024, 8192, 1, 12)


def test_experts_that_nobody_asks_for_are_not_read() -> None:
    experts = Experts(count=8, asked=2, bytes=8000)
    assert experts.unread_bytes(1) == 6000
    assert experts.unread_bytes(2) == 4500  # three quarters of those that the first leaves
    assert experts.unread_bytes(256) < 1e-9
    assert Experts(count=0, asked=0, bytes=0).unread_bytes(1) == 0


def test_steps_with_so_many_sequences_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIGS["llama-8b"], **TINY, "dtype": "float32"}
    monkeypatch.setitem(CONFIGS, "tiny", config)
    monkeypatch.setattr(gpu_shapes, "PROMPT", 20)
    monkeypatch.setattr(gpu_shapes, "STEPS", 4)
    timings = time_model("tiny", [1, 3])
    assert [each.rows for each in timings] == [1, 3]
    for each in timings:
        assert each.step_ms > 0 and each.bound_share == pytest.approx(each.bound_ms / each.step_ms, rel=0.1)
