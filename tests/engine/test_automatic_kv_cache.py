"""What `--kv-cache-dtype auto` comes to on each device, and that `model` is the model's own type on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine import startup
from quire.engine.config import EngineConfig
from quire.engine.device import kv_cache
from quire.engine.device.kv_cache import named_format
from quire.engine.device.runner import ModelRunner
from quire.engine.models.config import ModelConfig
from quire.engine.models.native_config import read_native
from quire.kernels.formats.kv_format import FP12, UNSCALED, KVFormat
from quire.kernels.gpu import NO_GPU, Gpu
from tests.kernels.gpus import GPUS

BF16 = torch.bfloat16


def held_by(model: ModelConfig, dtype: torch.dtype, gpu: Gpu, block_size: int = 16) -> KVFormat:
    """What auto has keys and values held as, after a look at `model`."""
    auto, own = EngineConfig(model="any"), EngineConfig(model="any", kv_cache_dtype="model")
    assert named_format(own.kv_cache_dtype, model, dtype, gpu, block_size) == UNSCALED[dtype]
    return named_format(auto.kv_cache_dtype, model, dtype, gpu, block_size)


@pytest.fixture
def model(model_folder: Callable[[str], Path]) -> ModelConfig:
    """Four query heads of 64 on one kv head, eight layers without windows."""
    config = read_native(model_folder("llama3-sharded"))
    return replace(config, num_layers=8, windows=(0,) * 8)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *({"num_heads": group} for group in (1, 2, 8)),
        {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
        {"num_layers": 16, "windows": (0, 20) * 8},  # eight of each kind to a block
        {"num_layers": 5, "windows": (0,) * 5},
    ],
)
def test_on_hopper_bfloat16_is_held_in_fp12(model: ModelConfig, changes: dict[str, Any]) -> None:
    assert held_by(replace(model, **changes), BF16, GPUS[90]) == FP12


@pytest.mark.parametrize(
    "changes",
    [
        *({"num_heads": group} for group in (3, 7, 16, 32)),  # which were not timed
        *({"head_dim": head_dim} for head_dim in (32, 80, 96, 256)),
        {"windows": (20,) * 8},
        {"num_layers": 4, "windows": (0,) * 4},  # with one dequantized they take no less memory
        {"windows": (0, 20) * 4},  # nor do they of each kind
    ],
)
def test_models_that_it_does_not_suit_keep_their_type(model: ModelConfig, changes: dict[str, Any]) -> None:
    assert held_by(replace(model, **changes), BF16, GPUS[90]) == UNSCALED[BF16]


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_blocks_that_hoppers_kernels_do_not_take_keep_the_models_type(
    model: ModelConfig, block_size: int
) -> None:
    assert held_by(model, BF16, GPUS[90], block_size) == UNSCALED[BF16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_stay_as_they_are(model: ModelConfig, dtype: torch.dtype) -> None:
    assert held_by(model, dtype, GPUS[90]) == UNSCALED[dtype]


@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120])
def test_other_gpus_keep_the_models_type(model: ModelConfig, capability: int) -> None:
    assert held_by(model, BF16, GPUS[capability]) == UNSCALED[BF16]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_cpu_keeps_the_models_type(model: ModelConfig, dtype: torch.dtype) -> None:
    assert held_by(model, dtype, NO_GPU) == UNSCALED[dtype]


@pytest.mark.parametrize(("given", "named"), [("auto", "fp12_e4m7"), ("model", "bfloat16")])
def test_an_engine_says_what_it_came_to(
    given: str, named: str, monkeypatch: pytest.MonkeyPatch, model_folder: Callable[[str], Path]
) -> None:
    monkeypatch.setattr(kv_cache, "automatic_format", lambda *_: FP12)  # as if a CPU were a Hopper GPU
    settings = {"model": str(model_folder("llama3-sharded")), "device": "cpu", "dtype": "bfloat16"}
    core, info = startup.start_engine(
        EngineConfig(**settings, kv_cache_dtype=given, num_gpu_blocks_override=2, swap_space=0)
    )
    assert isinstance(core.runner, ModelRunner)
    assert info.kv_cache_dtype == core.runner.cache.layers[0].format.name == named
