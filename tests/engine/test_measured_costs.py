"""What a preemption costs either way is measured at start, which is not held up where steps are slow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.plan import StepPlan
from engine.runner import Limits
from engine.startup import measure_costs

PER_STEP = 0.001
PER_BLOCK = 0.0005


class TimedRunner:
    """Its steps take as long as they are said to take, on a clock of its own."""

    def __init__(self, device: str, per_token: float, limits: Limits) -> None:
        self.device = torch.device(device)
        self.limits = limits
        self.cache = SimpleNamespace(host=range(1000))
        self.clock = 0.0
        self.prefills: list[int] = []
        self._per_token = per_token

    def launch(self, plan: StepPlan) -> Any:
        self.prefills.append(len(plan.prefill_tokens))
        seconds = PER_STEP + len(plan.prefill_tokens) * self._per_token + len(plan.swap_out) * PER_BLOCK

        def wait() -> None:
            self.clock += seconds

        return SimpleNamespace(wait=wait, has_moved=lambda wait: True)


@pytest.mark.parametrize("most", [4, 100, 2048])
@pytest.mark.parametrize("per_token", [1e-6, 1e-3, 0.02])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_they_are_those_of_the_steps_timed(
    device: str, per_token: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = TimedRunner(device, per_token, Limits(4, 2048, most))
    monkeypatch.setattr("engine.startup.time.perf_counter", lambda: runner.clock)
    costs = measure_costs(runner, num_blocks=100)
    assert costs.seconds_per_block == pytest.approx(PER_BLOCK)
    longest = max(runner.prefills)
    assert costs.seconds_per_token == pytest.approx(per_token + PER_STEP / longest)
    if device == "cuda":
        assert longest == most and set(runner.prefills) == {1, most}
    else:
        assert runner.clock < 3.0  # 512 tokens of 20 ms are 10 s, and each is timed three times
        assert longest >= min(most, 512 if per_token == 1e-6 else 8)
