"""Whose computation makes steps raise: found by trying those it may be, in ever smaller companies.

An exception from the device says nothing of the row it comes from. So what is in flight is dropped and every
running group yields, to be recomputed, which changes no token. Then companies of them run, nobody beside them
and each step committed before the next. One that raises is halved; who raises alone is it, unless a request
of our own, which is tried before all others, raises as well.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from operator import attrgetter

from quire.engine.messages import Output, Request, SamplingParams, StepOutputs
from quire.engine.schedule.draft import Flight
from quire.engine.schedule.plan import StepPlan
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.schedule.state import RunQueue
from quire.engine.sequences.sequence import SequenceGroup

CONTROL_ID = -2  # of the request of our own
MAX_FRUITLESS = 4  # rounds of trials that change nothing, after which no request is believed to be the cause
CALM_STEPS = 1000  # without one that raises, after which all is as it was before
MORE_TOKENS = 2  # after which a group is cleared: it was computed again, and has taken a decode step

logger = logging.getLogger("quire.isolation")

Company = dict[SequenceGroup, int]
"""Groups that are tried together, and the length at which each is cleared."""


class Isolation:
    """Decides who may be scheduled, and what becomes of a step that raised.

    An error that seems to be no request's fault is raised again, whatever is asked for, and ends the engine.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue = scheduler.queue
        self._trials: list[Company] = []  # the next one last
        self._error: Exception | None = None  # which the last round of trials began with
        self._fruitful = False  # this round has changed something
        self._fruitless = 0  # rounds of late that have not
        self._calm = 0  # steps since the last one that raised
        self._full_budget = scheduler.max_num_batched_tokens
        self._most_groups: int | None = None  # that run at once, when memory is short

    @property
    def on_trial(self) -> bool:
        """Whether a step is to be committed before the next one is scheduled."""
        return bool(self._trials)

    def schedule(self, now: float) -> StepPlan | None:
        """The next step's plan, with those who may run now. `now`: monotonic seconds."""
        while self._trials and not any(group.live for group in self._trials[-1]):  # their clients have left
            self._end_trial()
        queue = self._queue
        if self._trials:
            may_enter = set(self._trials[-1])
        elif self._most_groups is not None:
            may_enter = set(list(queue.waiting)[: max(0, self._most_groups - len(queue.running))])
        else:
            return self._scheduler.schedule(now)
        aside = [group for group in queue.waiting if group not in may_enter]
        queue.waiting = deque(group for group in queue.waiting if group in may_enter)
        plan = self._scheduler.schedule(now)
        queue.waiting = deque(sorted((*queue.waiting, *aside), key=attrgetter("order")))
        return plan

    def passed(self, outputs: StepOutputs) -> StepOutputs:
        """A step was committed. Returns its outputs, less those of our own request."""
        if not self._trials:
            self._calm += 1
            if self._calm == CALM_STEPS:
                self._fruitless = 0
                self._enlarge()
            return outputs
        company = self._trials[-1]
        tried = self._queue.running or [group for group in company if group.live]
        if all(_length(group) >= company[group] for group in tried):
            self._end_trial()
        return StepOutputs() if _is_control(company) else outputs

    def raised(self, error: Exception) -> list[Output]:
        """The oldest step in flight raised `error`, and none is under way any more. Returns what ends by it.

        Raises `error` if no request is to blame for it.
        """
        self._calm = 0
        company = self._trials.pop() if self._trials else None
        if company is not None and _is_control(company):
            raise error
        groups = list(_groups_in(self._queue.flights[0]) if company is None else company)
        suspects = [group for group in groups if group.live]
        while self._queue.flights:
            _drop(self._queue, self._queue.flights.pop())
        self._yield_all()
        smaller = isinstance(error, MemoryError) and self._shrink(len(suspects))
        self._fruitful |= smaller or len(suspects) < len(groups)
        if company is None:
            self._begin(suspects, error)
        elif len(suspects) == 1 and not smaller:
            return self._convict(suspects[0], error)
        else:
            self._add_trials(suspects)
        return []

    def _begin(self, suspects: list[SequenceGroup], error: Exception) -> None:
        self._error = error
        logger.warning("a step raised; its %d requests are tried apart", len(suspects), exc_info=error)
        self._add_trials(suspects)
        most = min(MORE_TOKENS, self._queue.capacity.max_model_len - 1)
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        self._scheduler.add(Request(CONTROL_ID, [0], params))
        self._add_trials([self._queue.waiting[-1]])
        self._queue.in_turn = False

    def _add_trials(self, suspects: list[SequenceGroup]) -> None:
        """They are tried next, in two halves."""
        half = (len(suspects) + 1) // 2
        for part in (suspects[half:], suspects[:half]):
            if part:
                self._trials.append({group: _length(group) + MORE_TOKENS for group in part})

    def _end_trial(self) -> None:
        """Those that were tried are cleared, unless they have ended, or found no room beside the others."""
        company = self._trials.pop()
        if not _is_control(company):
            self._fruitful |= any(group not in self._queue.running for group in company)
        self._yield_all()
        self._end_round()

    def _end_round(self) -> None:
        """If nobody is left to be tried. Raises what began the round if there have been too many in vain."""
        if self._trials:
            return
        self._queue.in_turn = True
        self._fruitless += not self._fruitful
        self._fruitful = False
        if self._fruitless > MAX_FRUITLESS and self._error is not None:
            raise self._error

    def _convict(self, group: SequenceGroup, error: Exception) -> list[Output]:
        """`group` raises alone: each of its choices ends, and nobody finds what it has computed."""
        request, kind = group.request, type(error).__name__
        logger.error(
            "request %d makes steps raise and ends", request.id, extra={"request": request.id, "error": kind}
        )
        words = f"computing it raised {kind}"
        if isinstance(error, MemoryError):
            words = "the device has too little memory to compute it"
            self._enlarge()
        choices = range(request.params.n) if group.beams else [sequence.index for sequence in group.live]
        for sequence in group.sequences:
            if sequence.finish_reason is None:
                self._queue.finish(sequence, "error")
            else:
                self._queue.blocks.forget(sequence)
        self._fruitful = True
        self._end_round()
        return [Output(request.id, index, [], finish_reason="error", error=words) for index in choices]

    def _yield_all(self) -> None:
        """Every running group goes back to those who wait, and is computed again when its turn comes."""
        queue = self._queue
        while queue.running:
            queue.leave(queue.running[-1], swapped=False)
            self._scheduler.yielding.recomputes += 1
        queue.waiting = deque(sorted(queue.waiting, key=attrgetter("order")))

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


def _is_control(company: Company) -> bool:
    return any(group.request.id == CONTROL_ID for group in company)


def _length(group: SequenceGroup) -> int:
    """How far all sequences of `group` that go on have come, in tokens."""
    return min(sequence.num_tokens for sequence in group.in_cache)


def _groups_in(flight: Flight) -> Iterable[SequenceGroup]:
    """Those that a step computes tokens of, oldest first."""
    sequences = [*flight.samples.sequences, *(sequence for sequence, _ in flight.filled)]
    return sorted({sequence.group for sequence in sequences}, key=attrgetter("order"))


def _drop(queue: RunQueue, flight: Flight) -> None:
    """`flight`, the newest one, brings nothing: not even what its transfers were to bring is used."""
    delivery = flight.delivery
    queue.blocks.copied(delivery.moves)
    queue.blocks.host.let_go(delivery.moves)
    for group in delivery.arrivals:
        group.transferring = False
        if group.swapped and group.live:
            for sequence in group.live:
                queue.blocks.host.drop(sequence)
            group.swapped = False
            queue.num_swapped -= 1
    for group in _groups_in(flight):
        if not any(sequence.num_generated for sequence in group.sequences):
            group.forked = len(group.sequences) == 1  # as before its prompt was computed
    for wanted in flight.prompt_logprobs:
        collected = wanted.group.prompt_logprobs
        assert collected is not None
        wanted.group.prompt_logprobs_asked = len(collected)
