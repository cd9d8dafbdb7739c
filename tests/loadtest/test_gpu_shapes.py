"""The grid of shapes: configurations that Quire reads as they are, and what a step of them has to read."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from quire.engine.config import EngineInfo
from quire.engine.models.reading import read_model
from quire.loadtest import gpu_shapes
from quire.loadtest.gpu_shapes import CONFIGS, Experts, time_model
from quire.loadtest.model_configs import COMMON
from quire.loadtest.offline.roofline import Ceilings
from quire.loadtest.shape_configs import STATES

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
    clock = itertools.count()
    monkeypatch.setitem(CONFIGS, "tiny", config)
    monkeypatch.setattr(gpu_shapes, "PROMPT", 20)
    monkeypatch.setattr(gpu_shapes, "STEPS", 4)
    monkeypatch.setattr(gpu_shapes, "time", SimpleNamespace(perf_counter=lambda: 0.002 * next(clock)))
    monkeypatch.setattr(gpu_shapes, "measure_ceilings", lambda device, dtype: Ceilings(1e9, 1e30))
    timings = time_model("tiny", [1, 3])
    assert [each.rows for each in timings] == [1, 3]
    attention = 2 * 64 * 4 * 16 + 2 * 64 * 2 * 16  # queries and outputs of four heads, keys and values of two
    weights = 4 * (2 * (attention + 3 * 64 * 128) + 512 * 64)
    for each in timings:
        # Of both layers a sequence reads keys and values of its 20 tokens and of one to five new ones.
        least, most = (weights + each.rows * tokens * 2 * 2 * 2 * 16 * 4 for tokens in (20, 26))
        assert least < 1e6 * each.bound_ms < most + 4 * 5 * 64  # with norms
        assert (each.step_ms, each.mean_ms) == pytest.approx((2, 2))
        assert each.bound_share == pytest.approx(each.bound_ms / 2, abs=0.001)


def test_experts_are_those_of_layers_that_have_some() -> None:
    info = cast("EngineInfo", SimpleNamespace(dtype="bfloat16", kept_bits=()))
    found = Experts.of(STATES["kimi-linear-8-layers"], info)
    assert found == Experts(count=256, asked=8, bytes=2 * 7 * 256 * 3 * 2304 * 1024)
