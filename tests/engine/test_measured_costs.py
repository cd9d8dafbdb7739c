"""The costs of preemption are measured at start, which is not held up where steps are slow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.engine.device.limits import Limits
from quire.engine.preemption_costs import measure_costs
from quire.engine.schedule.plan import StepPlan

PER_STEP = 0.001
PER_BLOCK = 0.0005


class TimedRunner:
    """Its steps take as long as they are said to take, on a clock of its own."""

    def __init__(self, device: str, per_token: float, limits: Limits, per_pair: float = 0.0) -> None:
        self.device = torch.device(device)
        self.limits = limits
        self.cache = SimpleNamespace(host=range(1000))
        self.clock = 0.0
        self.prefills: list[int] = []
        self._per_token = per_token
        self._per_pair = per_pair

    def launch(self, plan: StepPlan) -> Any:
        self.prefills.append(len(plan.prefill_tokens))
        tokens, most = len(plan.prefill_tokens), int(plan.context_lens.max())
        assert most <= self.limits.max_model_len
        pairs = tokens * (most - tokens / 2)
        seconds = PER_STEP + tokens * self._per_token + pairs * self._per_pair
        seconds += len(plan.swap_out) * PER_BLOCK

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
    monkeypatch.setattr("quire.engine.preemption_costs.time.perf_counter", lambda: runner.clock)
    costs = measure_costs(runner, num_blocks=100)
    assert costs.seconds_per_block == pytest.approx(PER_BLOCK)
    longest = max(runner.prefills)
    assert costs.seconds_per_token == pytest.approx(per_token + PER_STEP / longest)
    if device == "cuda":
        assert longest == most and set(runner.prefills) == {1, most}
    else:
        assert runner.clock < 3.0  # 512 tokens of 20 ms are 10 s, and each is timed three times
        assert longest >= min(most, 512 if per_token == 1e-6 else 8)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_long_context_is_priced_by_what_its_attention_takes(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100,000 tokens take a hundred chunks, the last of which attend to all the others."""
    per_token, per_pair, length = 1e-5, 2e-9, 100_000
    runner: Any = TimedRunner(device, per_token, Limits(4, 2048, 131_072), per_pair)
    monkeypatch.setattr("quire.engine.preemption_costs.time.perf_counter", lambda: runner.clock)
    costs = measure_costs(runner, num_blocks=10_000)
    takes = length * per_token + length * length / 2 * per_pair
    launches = PER_STEP * length / max(runner.prefills)
    assert costs.prefill_seconds(length) == pytest.approx(takes + launches, rel=0.01)
    assert costs.prefill_seconds(2048) == pytest.approx(2048 * (per_token + 1024 * per_pair), rel=0.25)
    # So many blocks that bringing them out and in is worth it, were it not worth it by the token alone.
    blocks = int(takes / PER_BLOCK / 2 * 0.9)
    assert costs.swaps(blocks, [length])
    assert not costs.swaps(blocks, [length // 4] * 4), "four sequences of a quarter take less attention"
    assert not costs.swaps(blocks * 2, [length])
