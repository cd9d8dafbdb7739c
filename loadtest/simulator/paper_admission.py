"""The paper's rule for who is let in after a preemption, to be compared with Quire's (section 4.5)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from quire.engine.schedule.plan import StepPlan
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.sequences.sequence import SequenceGroup


class PaperAdmission(Scheduler):
    """Lets no new request in until all that were preempted have completed; Quire, once they are back."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._preempted: set[SequenceGroup] = set()  # and not completed

    def schedule(self, now: float = 0.0, only: Collection[SequenceGroup] | None = None) -> StepPlan | None:
        returning = [group for group in self.state.waiting if group.queue_seconds is not None]
        self._preempted = {group for group in (*self._preempted, *returning) if group.live}
        if self._preempted:
            only = [group for group in returning if only is None or group in only]
        return super().schedule(now, only)
