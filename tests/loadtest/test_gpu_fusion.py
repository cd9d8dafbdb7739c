"""Steps of transformers' models with what is fused and without: both are timed, and compute the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.engine.models.reading import read_model
from quire.kernels.backend import torch_backend
from quire.loadtest import gpu_fusion
from quire.loadtest.gpu_fusion import compare
from quire.loadtest.model_configs import COMMON
from quire.loadtest.shape_configs import UNGATED

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 300,
}


@pytest.mark.parametrize("name", UNGATED)
def test_each_configuration_is_one_that_quire_reads(tmp_path: Path, name: str) -> None:
    config = UNGATED[name]
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **config}))
    model = read_model(tmp_path, "transformers")
    heads = (config["num_attention_heads"], config["num_key_value_heads"])
    assert (model.num_heads, model.num_kv_heads) == heads


@pytest.mark.parametrize(
    ("name", "kv_heads", "fused"), [("starcoder2-3b", 2, "layers"), ("pythia-2.8b", 4, "modules")]
)
def test_a_step_is_timed_with_what_is_fused_and_without(
    monkeypatch: pytest.MonkeyPatch, name: str, kv_heads: int, fused: str
) -> None:
    seconds = iter([0.001, 0.002, 0.003, 0.004])  # fused ones first

    def one_run(run: Callable[[], object]) -> float:
        run()
        return next(seconds)

    monkeypatch.setattr(gpu_fusion, "CONTEXT", 20)
    monkeypatch.setattr(gpu_fusion, "graph_seconds", one_run)
    config = {**UNGATED[name], **SMALL, "num_key_value_heads": kv_heads}
    cpu = torch.device("cpu")
    timings = compare(name, config, [1, 3], torch_backend(), cpu, torch.float32)
    assert [(each.rows, each.fused_ms, each.modules_ms) for each in timings] == [(1, 1, 3), (3, 2, 4)]
    for each in timings:
        assert each.fused == fused and each.apart < 1e-4
