"""The states that a request has been in, one after the other, and when each began."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quire.engine.messages import FinishReason
from quire.engine.records import Company, Miss, Preemption, RequestRecord, Span, SpanName, Waited

MAX_SPANS = 512  # beyond which spans of a name are added up
MAX_PREEMPTIONS = 32  # that are told of, each; more are counted

_OFTEN = frozenset({"decode", "masks"})  # which take turns with each token


@dataclass(slots=True, eq=False, repr=False)
class Timeline:
    """Told of each change of a request's state, and of nothing while there is none."""

    arrival: float
    name: SpanName = "queue"
    spans: list[Span] = field(default_factory=list)
    queued_behind: int = 0
    waited_before: tuple[float, ...] = ()  # how long the queue had stood still when it came
    waited: list[Waited] = field(default_factory=list)
    miss: Miss | None = None
    preemptions: list[Preemption] = field(default_factory=list)
    num_preemptions: int = 0
    company: Company = field(default_factory=Company)
    _since: float = field(init=False)
    _between: bool = False  # the state that is entered next has begun already
    _count: int = 0  # tokens that the chunk computes
    _recomputing: bool = False
    _steps: Company | None = None  # all steps there were when it began to decode

    def __post_init__(self) -> None:
        self._since = self.arrival

    def enter(self, name: SpanName, now: float, count: int = 0) -> None:
        """Begin another state."""
        if not self._between:
            self._close(now)
        self.name, self._count, self._between = name, count, False

    def _close(self, now: float) -> None:
        seconds = now - self._since
        if seconds > 0 or self._count:
            self._add(self.name, self._since, max(seconds, 0.0), self._count)
        self._since = max(now, self._since)

    def _add(self, name: SpanName, start: float, seconds: float, count: int) -> None:
        spans = self.spans
        earlier: Span | None = None
        if spans and spans[-1].name == name and not count:
            earlier = spans[-1]
            earlier.pieces -= name not in _OFTEN  # else it only goes on
        elif len(spans) > 1 and name in _OFTEN and spans[-1].name in _OFTEN and spans[-2].name == name:
            earlier = spans[-2]
        elif len(spans) >= MAX_SPANS:
            earlier = next((span for span in reversed(spans) if span.name == name), None)
        if earlier is None:
            spans.append(Span(name, start, seconds, count))
        else:
            earlier.seconds += seconds
            earlier.count += count
            earlier.pieces += 1

    def admit(self, now: float, waited: list[Waited]) -> None:
        """Leave the queue, which stood still for `waited` meanwhile."""
        self.waited = waited
        for_blocks = sum(each.seconds for each in waited if each.wait.reason == "blocks")
        self._close(max(self._since, now - for_blocks))
        self.name = "waiting_for_blocks"
        self._close(now)
        self._between = True

    def chunk(self, now: float, tokens: int) -> None:
        """Begin to compute `tokens` of a prompt, or of what a preemption has lost."""
        self.enter("recompute" if self._recomputing else "prefill", now, tokens)

    def decode(self, now: float, steps: Company) -> None:
        """Begin to decode, or go on. `steps`: all that there have been."""
        self.count_steps(steps)
        if self.preemptions and (last := self.preemptions[-1]).back is None and last.away is not None:
            last.back = now - last.at - last.away
        self._recomputing = False
        self.enter("decode", now)

    def count_steps(self, steps: Company) -> None:
        """Count the steps that follow as its own, until it stops decoding."""
        if self._steps is None:
            self._steps = Company(steps.steps, steps.mixed, steps.prefilled, steps.sequences)

    def stop_decoding(self, steps: Company) -> None:
        """Add up the steps that were its own."""
        begun, company = self._steps, self.company
        if begun is not None:
            company.steps += steps.steps - begun.steps
            company.mixed += steps.mixed - begun.mixed
            company.prefilled += steps.prefilled - begun.prefilled
            company.sequences += steps.sequences - begun.sequences
            self._steps = None

    def preempt(self, now: float, mode: Literal["swap", "recompute"], steps: Company) -> Preemption:
        """Begin to wait without blocks; return the record of it, for whoever knows why."""
        self.stop_decoding(steps)
        self._recomputing = mode == "recompute"
        self.enter("swapped_out" if mode == "swap" else "preempted", now)
        preemption = Preemption(now, mode)
        self.num_preemptions += 1
        if len(self.preemptions) < MAX_PREEMPTIONS:
            self.preemptions.append(preemption)
        return preemption

    def lose(self, now: float) -> None:
        """Wait on without what was in host memory: that is going to be computed again."""
        self._recomputing = True
        self.enter("preempted", now)

    def come_back(self, now: float) -> None:
        """Note that it is let in again, if it was preempted."""
        if self.preemptions and (last := self.preemptions[-1]).away is None:
            last.away = now - last.at
            self._close(now)
            self._between = True

    def end(
        self,
        request_id: int,
        now: float,
        reason: FinishReason,
        steps: Company,
        tokens: tuple[int, int, int],
    ) -> RequestRecord:
        """Return all of it. tokens: of the prompt, of those that were cached, and of these in host memory."""
        self.stop_decoding(steps)
        self.enter("ended", now)
        return RequestRecord(
            request_id,
            self.arrival,
            self._since,
            reason,
            self.spans,
            self.queued_behind,
            self.waited,
            *tokens,
            self.miss,
            self.preemptions,
            self.num_preemptions,
            self.company,
        )
