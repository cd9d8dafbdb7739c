"""The bound beside which `quire bench` reports: no step's products take less than it says."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

from engine.config import EngineConfig, StepStats
from engine.models.config import ModelConfig
from engine.runner import ModelRunner
from engine.startup import start_engine
from service.bench import Ceilings, _bound
from tests.models.paged_driver import PagedDriver


@pytest.mark.parametrize("name", ["llama-tied-linear", "qwen3-bias", "opt-no-bias", "gpt2"])
def test_a_step_has_at_least_the_bounds_arithmetic(name: str, model_folder: Callable[[str], Path]) -> None:
    folder = model_folder(name)
    core, info = start_engine(
        EngineConfig(model=str(folder), dtype="float32", num_gpu_blocks_override=4, swap_space=0)
    )
    assert isinstance(core.runner, ModelRunner)
    driver = PagedDriver(core.runner.model, ModelConfig.from_folder(folder), rows=8, max_len=100)
    for decodes, chunks in (
        ({}, {row: [5] * 12 for row in range(8)}),
        ({0: 1, 1: 2}, {row: [7] * 20 for row in range(2, 8)}),
        (dict.fromkeys(range(8), 3), {}),
    ):
        with FlopCounterMode(display=False) as counter:
            driver.step_of_newest(decodes, chunks)
        tokens = {"prefill_tokens": sum(map(len, chunks.values())), "decode_tokens": len(decodes)}
        stats = StepStats(**dict.fromkeys(StepStats.__struct_fields__, 0) | tokens)
        bound = _bound(stats, info, Ceilings(bandwidth=inf, flops=1.0))
        assert counter.get_total_flops() / 2 < bound <= counter.get_total_flops()
