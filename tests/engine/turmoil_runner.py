"""An oracle whose steps raise or are interrupted, whose logits may not be finite, and that may pool."""

from __future__ import annotations

from dataclasses import replace as replaced
from typing import Any

import numpy as np
from msgspec.structs import replace

from quire.engine.messages import Request
from quire.engine.schedule.plan import NOT_FINITE, StepPlan, StepResult
from tests.engine.oracle import OracleHandle, slot_history
from tests.engine.poison import POISON, PoisonedRunner

NOT_FINITE_FROM = 1 << 42  # seeds from here on are of requests whose logits are not finite at some time


def unfinite(request: Request, position: int) -> Request:
    """The logits of its tokens behind `position` are not finite."""
    return replace(request, params=replace(request.params, seed=NOT_FINITE_FROM + position))


def last_finite(request: Request) -> int | None:
    """Return the position that an `unfinite` request was given."""
    seed = request.params.seed or 0
    return seed - NOT_FINITE_FROM if seed >= NOT_FINITE_FROM else None


def is_poisoned(request: Request) -> bool:
    return POISON <= (request.params.seed or 0) < NOT_FINITE_FROM


def expected_vector(prompt: list[int]) -> list[float]:
    history = 0
    for position, token in enumerate(prompt):
        history = slot_history(history, position, token)
    return _vector(history)


def _vector(history: int) -> list[float]:
    return [float(history % 65521), float(history % 257)]


class InterruptedHandle(OracleHandle):
    """Of any step of a TurmoilRunner."""

    def __init__(self, runner: TurmoilRunner, handle: OracleHandle) -> None:
        self.interrupting = runner
        self.handle = handle

    def wait(self) -> StepResult:
        if self.interrupting.rng.random() < self.interrupting.waits_interrupted:
            raise KeyboardInterrupt
        return self.handle.wait()

    def has_moved(self, *, wait: bool = False) -> bool:
        return self.handle.has_moved(wait=wait)


class TurmoilRunner(PoisonedRunner):
    waits_interrupted = launches_interrupted = 0.0  # how likely
    pools = False

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings, **named)
        # Of a row whose tokens are penalised: how many the device knows of.
        self.penalised: dict[int, int | None] = {}

    def launch(self, plan: StepPlan) -> OracleHandle:
        for start in plan.starts:
            counts = bool(start.prompt)
            self.penalised[start.row] = start.num_prompt + len(start.output) if counts else None
        if not self.failed and self.rng.random() < self.launches_interrupted:
            self.failed = True
            raise KeyboardInterrupt
        return InterruptedHandle(self, super().launch(plan))

    def _result(
        self,
        plan: StepPlan,
        tokens: Any,
        ids: list[int],
        sampled: list[int],
        histories: list[int],
    ) -> StepResult:
        result = super()._result(plan, tokens, ids, sampled, histories)
        if self.pools:
            vectors = np.array([_vector(history) for history in histories], np.float32).reshape(-1, 2)
            return replaced(result, vectors=vectors)
        for row, position in zip(plan.sample_rows.tolist(), plan.sample_positions.tolist(), strict=True):
            counted = self.penalised[row]
            if counted is not None:
                assert position == counted, "tokens are penalised that are not the sequence's"
                self.penalised[row] = counted + 1
        seeds = [self.state[row][0].seed or 0 for row in plan.sample_rows.tolist()]
        for i, position in enumerate(plan.sample_positions.tolist()):
            if seeds[i] >= NOT_FINITE_FROM and position > seeds[i] - NOT_FINITE_FROM:
                result.tokens[i] = NOT_FINITE
                if result.logprobs is not None:
                    result.logprobs.top_logprobs[result.logprob_samples == i] = np.nan
        return result
