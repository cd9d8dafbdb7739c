"""A device that takes the time its plans should cost, on a clock that nobody waits for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.engine.arrays import Logprobs
from quire.engine.schedule.plan import Runner, StepHandle, StepPlan, StepResult
from quire.loadtest.simulator.step_costs import StepCosts

VOCAB = 60_000
MEAN_GAP = 1.0  # nats between a beam's candidates, next best to next best: exponential

Words = NDArray[np.uint64]


class VirtualClock:
    """Seconds since the start."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


class _VirtualHandle(StepHandle):
    def __init__(self, clock: VirtualClock, end: float, result: StepResult) -> None:
        self._clock = clock
        self._end = end
        self._result = result

    def wait(self) -> StepResult:
        self._clock.now = max(self._clock.now, self._end)
        return self._result


class CostedRunner(Runner):
    """A device that computes all steps, on a virtual clock: time is what its plans should cost."""

    def __init__(self, runner: Runner, costs: StepCosts, clock: VirtualClock) -> None:
        self.busy_seconds = 0.0
        self.context = 0  # tokens in the cache, row by row, once the step launched last is done
        self._runner = runner
        self._costs = costs
        self._clock = clock
        self._free_at = 0.0

    def launch(self, plan: StepPlan) -> StepHandle:
        seconds = self._costs.of(plan)
        self._free_at = max(self._free_at, self._clock.now) + seconds
        self.busy_seconds += seconds
        self.context = int(plan.context_lens.sum())
        return _VirtualHandle(self._clock, self._free_at, self._runner.launch(plan).wait())


class _Done(StepHandle):
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class VirtualRunner(Runner):
    """Runs plans at once. What it gives depends on request, sample and position only.

    A sampled token is a hash of (seed, sample index, position). A beam's candidates are drawn from a hash of
    (seed, last token, position), with log-probabilities that fall by exponential gaps.
    """

    def __init__(self, num_rows: int) -> None:
        self._keys = np.zeros(num_rows, np.uint64)
        self._candidates = np.zeros(num_rows, np.int64)
        self._last = np.zeros(num_rows, np.int64)

    def launch(self, plan: StepPlan) -> StepHandle:
        for start in plan.starts:
            self._candidates[start.row] = start.num_candidates
            sample = 0 if start.num_candidates else start.index + 1
            self._keys[start.row] = ((start.params.seed or 0) * 1_000_003 + sample) % (1 << 62)
        self._last[plan.override_rows] = plan.override_tokens
        ends = np.cumsum(plan.query_lens[plan.num_decodes :]) - 1
        self._last[plan.rows[plan.num_decodes :]] = plan.prefill_tokens[ends]
        rows = plan.sample_rows
        words = _mix(self._keys[rows] + _mix(plan.sample_positions.astype(np.uint64)))
        tokens = (words % np.uint64(VOCAB)).astype(np.int32)
        wanted = np.flatnonzero(self._candidates[rows])
        logprobs = self._search(words, rows, wanted) if len(wanted) else None
        self._last[rows] = tokens
        return _Done(StepResult(tokens, wanted.astype(np.int32), logprobs, ()))

    def _search(self, words: Words, rows: NDArray[np.int32], wanted: NDArray[np.int64]) -> Logprobs:
        k = int(self._candidates[rows[wanted]].max())
        tokens = np.empty((len(wanted), k), np.int32)
        logprobs = np.empty((len(wanted), k), np.float32)
        for at, sample in enumerate(wanted.tolist()):
            rng = np.random.default_rng([int(words[sample]), int(self._last[rows[sample]])])
            tokens[at] = rng.integers(0, VOCAB) + np.arange(k)
            logprobs[at] = -rng.exponential(MEAN_GAP, k).cumsum()
        return Logprobs(logprobs[:, 0], np.ones(len(wanted), np.int32), tokens % VOCAB, logprobs)


def _mix(words: Words) -> Words:
    """Mix by splitmix64's finaliser: neighbours come out far apart."""
    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
