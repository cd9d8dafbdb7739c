"""What a step allocates beside the KV cache, as a start measures it on a GPU: here with a GPU of numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from quire.engine.device.limits import Limits
from quire.engine.device.memory_profile import activation_bytes, written_out_bytes
from quire.engine.device.runner import ModelRunner
from quire.engine.schedule.plan import StepPlan
from quire.kernels.backend import torch_backend
from tests.models.kept_folder import load, save

OF_TOKEN, WRITTEN = 1000, 50_000_000
LIMITS = Limits(256, 8448, 8192)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """Return what allocates OF_TOKEN bytes a token, and a weight's numbers in steps of more than 256."""
    peak = 0

    def launch(step: StepPlan) -> Any:
        nonlocal peak
        tokens = len(step.prefill_tokens)
        peak = OF_TOKEN * tokens + (WRITTEN if tokens > 256 else 0)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    found = SimpleNamespace(device=None, limits=LIMITS, launch=launch, attends_to_latents=False)
    return cast(ModelRunner, found)


def test_what_is_written_out_is_not_counted_for_each_token(runner: ModelRunner) -> None:
    assert activation_bytes(runner, WRITTEN) == OF_TOKEN * LIMITS.max_num_batched_tokens


def test_the_largest_kept_weight_is_written_out(tmp_path: Any) -> None:
    folder = save("awq", tmp_path)
    kept, _ = load(folder)
    gate_up = max(outputs * inputs for outputs, inputs in (weight.shape for weight in kept.layers[0].weights))
    assert written_out_bytes(kept) == 4 * gate_up
    expanded, _ = load(folder, torch_backend())
    assert written_out_bytes(expanded) == 0
