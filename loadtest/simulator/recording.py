"""Measured steps of a real engine, for costs to be fitted to."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.engine.schedule.plan import Runner, StepHandle, StepPlan, StepResult
from quire.loadtest.simulator.step_costs import StepRecord, step_features


class RecordingRunner(Runner):
    """Passes plans on to another runner and times them. Wrap an engine's: `core.runner = ...`.

    A step is under way from its launch, or from the end of the step before if that is later, to its end.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float] = time.perf_counter) -> None:
        self.records: list[StepRecord] = []
        self.busy_seconds = 0.0
        self.context = 0  # tokens in the cache, row by row, once the step launched last is done
        self._runner = runner
        self._clock = clock
        self._ended = 0.0

    def launch(self, plan: StepPlan) -> StepHandle:
        launched = self._clock()
        self.context = int(plan.context_lens.sum())
        return _Timed(self, plan, launched, self._runner.launch(plan))

    def end(self, plan: StepPlan, launched: float) -> None:
        now = self._clock()
        seconds = now - max(launched, self._ended)
        self._ended = now
        self.busy_seconds += seconds
        self.records.append(StepRecord(step_features(plan).tolist(), seconds))


class _Timed(StepHandle):
    def __init__(self, runner: RecordingRunner, plan: StepPlan, launched: float, handle: StepHandle) -> None:
        self._runner = runner
        self._plan = plan
        self._launched = launched
        self._handle = handle

    def wait(self) -> StepResult:
        result = self._handle.wait()
        self._runner.end(self._plan, self._launched)
        return result

    def has_moved(self, *, wait: bool = False) -> bool:
        return self._handle.has_moved(wait=wait)
