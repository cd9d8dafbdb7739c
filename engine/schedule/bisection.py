"""Find the request that makes steps raise, by trying those that it may be in ever smaller groups.

An exception from the device says nothing of the row it comes from. So what is in flight is dropped and every
running group is preempted, to be recomputed, which changes no token. Then some of the suspects run, nobody
beside them and each step committed before the next. Those whose trial raises are halved; who raises alone is
blamed, unless a request of our own, which is tried before all others, raises as well.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import islice
from operator import attrgetter

from quire.engine.messages import Output, PoolingParams, Request, SamplingParams, StepOutputs
from quire.engine.schedule.draft import InFlightStep
from quire.engine.schedule.lifecycle import finish, preempt
from quire.engine.schedule.plan import StepPlan
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.schedule.state import SchedulerState
from quire.engine.sequences.sequence import SequenceGroup

CONTROL_ID = -2  # of the request of our own
MAX_FRUITLESS = 4  # rounds of trials that change nothing, after which no request is believed to be the cause
CALM_STEPS = 1000  # without one that raises, after which all is as it was before
MORE_TOKENS = 2  # after which a group is cleared: it was computed again, and has taken a decode step

logger = logging.getLogger("quire.isolation")

Suspects = dict[SequenceGroup, int]
"""Groups that are tried together, and the length at which each is cleared."""


class Bisection:
    """Decides who may be scheduled, and what becomes of a step that raised.

    An error that seems to be no request's fault is raised again, whatever is asked for, and ends the engine.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._state = scheduler.state
        self._trials: list[Suspects] = []  # the next one last
        self._error: Exception | None = None  # which the last round of trials began with
        self._fruitful = False  # this round has changed something
        self._fruitless = 0  # rounds of late that have not
        self._calm = 0  # steps since the last one that raised
        self._full_budget = scheduler.max_num_batched_tokens
        self._most_groups: int | None = None  # that run at once, when memory is short

    @property
    def in_progress(self) -> bool:
        """Return whether a step is to be committed before the next one is scheduled."""
        return bool(self._trials)

    def schedule(self, now: float) -> StepPlan | None:
        """Return the next step's plan, with those who may run now. `now`: monotonic seconds."""
        while self._trials and not any(group.live for group in self._trials[-1]):  # their clients have left
            self._end_trial()
        state = self._state
        if self._trials:
            return self._scheduler.schedule(now, only=self._trials[-1])
        if self._most_groups is not None:
            room = max(0, self._most_groups - len(state.running))
            return self._scheduler.schedule(now, only=set(islice(state.waiting, room)))
        return self._scheduler.schedule(now)

    def committed(self, outputs: StepOutputs) -> StepOutputs:
        """Note that a step went well; return its outputs, less those of our own request."""
        if not self._trials:
            self._calm += 1
            if self._calm == CALM_STEPS:
                self._fruitless = 0
                self._enlarge()
            return outputs
        suspects = self._trials[-1]
        tried = self._state.running or [group for group in suspects if group.live]
        if all(_length(group) >= suspects[group] for group in tried):
            self._end_trial()
        return StepOutputs() if _is_control(suspects) else outputs

    def raised(self, error: Exception) -> list[Output]:
        """Note that the oldest step in flight raised `error`, and none is under way; return what ends by it.

        Raises `error` if no request is to blame for it.
        """
        self._calm = 0
        trial = self._trials.pop() if self._trials else None
        if trial is not None and _is_control(trial):
            raise error
        groups = list(_groups_in(self._state.in_flight[0]) if trial is None else trial)
        suspects = [group for group in groups if group.live]
        self.undo()
        smaller = isinstance(error, MemoryError) and self._shrink(len(suspects))
        self._fruitful |= smaller or len(suspects) < len(groups)
        if trial is None:
            self._begin(suspects, error)
        elif len(suspects) == 1 and not smaller:
            return self._blame(suspects[0], error)
        else:
            self._add_trials(suspects)
        return []

    def undo(self) -> None:
        """Drop the steps in flight, none of which is under way; what they computed is computed again."""
        while self._state.in_flight:
            _drop(self._state, self._state.in_flight.pop())
        self._preempt_all()

    def _begin(self, suspects: list[SequenceGroup], error: Exception) -> None:
        self._error = error
        logger.warning("a step raised; its %d requests are tried apart", len(suspects), exc_info=error)
        self._add_trials(suspects)
        most = min(MORE_TOKENS, self._state.capacity.max_model_len - 1)
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        pooling = PoolingParams() if self._state.capacity.pools else None
        self._scheduler.add(Request(CONTROL_ID, [0], params, pooling=pooling))
        self._add_trials([self._state.waiting[-1]])
        self._state.in_turn = False

    def _add_trials(self, suspects: list[SequenceGroup]) -> None:
        """Have them tried next, in two halves."""
        half = (len(suspects) + 1) // 2
        for part in (suspects[half:], suspects[:half]):
            if part:
                self._trials.append({group: _length(group) + MORE_TOKENS for group in part})

    def _end_trial(self) -> None:
        """Clear those that were tried, unless they have ended, or found no room beside the others."""
        cleared = self._trials.pop()
        if not _is_control(cleared):
            self._fruitful |= any(group not in self._state.running for group in cleared)
        self._preempt_all()
        self._end_round()

    def _end_round(self) -> None:
        """Go on if nobody is left to be tried. Raises what began the round after too many in vain."""
        if self._trials:
            return
        self._state.in_turn = True
        self._fruitless += not self._fruitful
        self._fruitful = False
        if self._fruitless > MAX_FRUITLESS and self._error is not None:
            raise self._error

    def _blame(self, blamed: SequenceGroup, error: Exception) -> list[Output]:
        """End each choice of `blamed`, which raises alone; nobody finds what it has computed."""
        request, kind = blamed.request, type(error).__name__
        logger.error(
            "request %d makes steps raise and ends", request.id, extra={"request": request.id, "error": kind}
        )
        words = f"computing it raised {kind}"
        if isinstance(error, MemoryError):
            words = "the device has too little memory to compute it"
            self._enlarge()
        choices = range(request.params.n) if blamed.beams else [sequence.index for sequence in blamed.live]
        for sequence in blamed.sequences:
            if sequence.finish_reason is None:
                finish(self._state, sequence, "error")
            else:
                self._state.blocks.forget(sequence)
        self._fruitful = True
        self._end_round()
        return [Output(request.id, index, [], finish_reason="error", error=words) for index in choices]

    def _preempt_all(self) -> None:
        """Have every running group wait, to be computed again when its turn comes."""
        while self._state.running:
            preempt(self._state, self._state.running[-1], swapped=False)
            self._scheduler.preemption.recomputes += 1

    def _shrink(self, num_groups: int) -> bool:
        """Have steps take less memory than one of `num_groups` did. False if they take the least already."""
        scheduler = self._scheduler
        least = scheduler.rows.size  # each running sequence takes a token of a step
        if scheduler.max_num_batched_tokens > least:
            scheduler.max_num_batched_tokens = max(least, scheduler.max_num_batched_tokens // 2)
            return True
        if num_groups > 1:
            self._most_groups = num_groups // 2
        return num_groups > 1

    def _enlarge(self) -> None:
        self._most_groups = None
        self._scheduler.max_num_batched_tokens = self._full_budget


def _is_control(suspects: Suspects) -> bool:
    return any(group.request.id == CONTROL_ID for group in suspects)


def _length(group: SequenceGroup) -> int:
    """Return how far all sequences of `group` that go on have come, in tokens."""
    return min(sequence.num_tokens for sequence in group.in_cache)


def _groups_in(step: InFlightStep) -> Iterable[SequenceGroup]:
    """Return the groups that a step computes tokens of, oldest first."""
    sequences = [*step.samples.sequences, *(sequence for sequence, _ in step.filled)]
    return sorted({sequence.group for sequence in sequences}, key=attrgetter("order"))


def _drop(state: SchedulerState, step: InFlightStep) -> None:
    """Undo `step`, the newest one: not even what its transfers were to bring is used."""
    transfers = step.transfers
    state.blocks.copied(transfers.moves)
    state.blocks.host.let_go(transfers.moves)
    for group in transfers.groups:
        group.transferring = False
        if group.swapped and group.live:
            for sequence in group.live:
                state.blocks.host.drop(sequence)
            group.swapped = False
            state.num_swapped -= 1
            group.timeline.lose(state.clock())
    for group in _groups_in(step):
        if not any(sequence.num_generated for sequence in group.sequences):
            group.forked = len(group.sequences) == 1  # as before its prompt was computed
    for wanted in step.prompt_logprobs:
        collected = wanted.group.prompt_logprobs
        assert collected is not None
        wanted.group.prompt_logprobs_asked = len(collected)
