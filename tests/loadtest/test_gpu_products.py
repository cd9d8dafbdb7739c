"""What is timed of a layer beside its attention: all its matrices, and the same result both ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.engine.models.native_config import read_native
from quire.loadtest.gpu_products import random_layer, run_cublas, run_fused


@pytest.mark.parametrize("name", ["qwen3", "llama-tied-linear"])
def test_both_ways_compute_a_whole_layer(model_folder: Callable[[str], Path], name: str) -> None:
    config = read_native(model_folder(name))
    layer = random_layer(config, torch.device("cpu"), torch.float32)
    matrices = (layer.output, layer.gate_up, layer.down, layer.qkv)
    assert sum(matrix.weight.numel() for matrix in matrices) == config.layer_weights

    attended = torch.randn(3, config.num_heads * config.head_dim)
    residual = torch.randn(3, config.hidden_size)
    ours, cublas = residual.clone(), residual.clone()
    queries = run_fused(layer, attended, ours)
    torch.testing.assert_close(queries, run_cublas(layer, attended, cublas))
    torch.testing.assert_close(ours, cublas)

    x = torch.nn.functional.rms_norm(
        residual + attended @ layer.output.weight.T, (config.hidden_size,), eps=1e-6
    )
    gate, up = (x @ layer.gate_up.weight.T).chunk(2, dim=1)
    gated = torch.nn.functional.silu(gate) * up
    expected = residual + attended @ layer.output.weight.T + gated @ layer.down.weight.T
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
