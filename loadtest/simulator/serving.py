"""A whole run by the clock: requests arrive at their times, an engine core steps, memory is accounted for.

The clock and the device may be virtual or real, and nothing here knows which.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

import numpy as np

from quire.engine.core import EngineCore
from quire.engine.messages import Request, SamplingParams
from quire.loadtest.client.records import Record
from quire.loadtest.client.sessions import Session
from quire.loadtest.simulator.baselines import Memory


class Clock(Protocol):
    """Seconds since the start of the run."""

    @property
    def now(self) -> float: ...

    def wait_until(self, moment: float) -> None:
        """Jump to `moment`: nothing happens before."""
        ...


class Meter(Protocol):
    """All that a device has done so far."""

    @property
    def busy_seconds(self) -> float: ...

    @property
    def context(self) -> int:
        """Return the tokens in the cache, row by row, once the step launched last is done."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The use of the KV slots during one step. The last four add up to all slots (section 3.1, Fig. 2)."""

    seconds: float  # that the step takes
    requests: int  # under way
    is_short: bool  # somebody waits for memory
    blocks: int  # active
    references: int  # to active blocks by tables: what they would be if nothing were shared
    tokens: int  # slots that hold a token's keys and values
    reserved: int  # slots that will hold one in the end, and nothing yet
    internal: int  # given to a sequence, and never to be used
    others: int  # given to nobody: free, or too scattered to be given


@dataclass(slots=True)
class Run:
    """The outcome. Records are in the order of the sessions; tokens by (request, sample)."""

    records: list[Record]  # of requests that have all their tokens
    uses: list[MemoryUse]
    decoded: list[tuple[float, int]]  # when a step began, and how many rows decoded in it for an answer
    tokens: dict[tuple[int, int], list[int]]
    seconds: float
    preemptions: int
    unfinished: int  # requests that were under way or had not come when time was up

    def mean_requests(self) -> float:
        """Return how many were under way at once, over the time in which any was."""
        return self._mean(lambda use: use.requests, lambda use: use.requests > 0)

    def shares_under_load(self) -> dict[str, float]:
        """Return parts of the memory while somebody waits for some, in per cent; nothing if nobody does."""
        names = ("tokens", "reserved", "internal", "others")
        if not any(use.is_short for use in self.uses):
            return {}
        slots = sum(getattr(self.uses[0], name) for name in names)
        return {name: 100 / slots * self._mean(attrgetter(name), lambda use: use.is_short) for name in names}

    def blocks_saved(self) -> float:
        """Return the blocks that sharing saves, in per cent: (references − blocks) ÷ references (Fig. 15)."""
        everything = self._mean(lambda use: use.references, lambda use: True)
        return 100 * (1 - self._mean(lambda use: use.blocks, lambda use: True) / everything)

    def wasted_in_blocks(self) -> float:
        """Return the slots given to sequences that hold no token, in per cent."""
        given = self._mean(lambda use: use.tokens + use.internal, lambda use: True)
        return 100 * self._mean(lambda use: use.internal, lambda use: True) / given

    def normalized_latency(self) -> float:
        """Return the mean in seconds a token; infinite if no request has all its tokens."""
        if not self.records:
            return math.inf
        return float(np.mean([record.normalized_latency for record in self.records]))

    def batch_rate(self) -> float:
        """Return the requests a second that had their tokens after the first ones, which end together."""
        ends = [record.last for record in self.records]
        if not ends or min(ends) == max(ends):
            return len(ends) / self.seconds if self.seconds else 0.0
        return sum(end > min(ends) for end in ends) / (max(ends) - min(ends))

    def decode_rate(self, since: float) -> float:
        """Return the tokens a second that rows decoded, dropped beams' too, from then to the end."""
        tokens = sum(count for time, count in self.decoded if time > since)
        return tokens / (self.seconds - since)

    def _mean(self, value: Callable[..., float], when: Callable[[MemoryUse], bool]) -> float:
        chosen = [use for use in self.uses if when(use)]
        weights = np.array([use.seconds for use in chosen])
        return float(np.average([value(use) for use in chosen], weights=weights)) if chosen else 0.0


@dataclass(slots=True)
class _Live:
    record: Record
    request: Request
    unfinished: int  # sequences
    wanted: int  # tokens of all its sequences that are still to come, without what pads them


def serve(
    sessions: Sequence[Session],
    core: EngineCore,
    memory: Memory,
    slots: int,
    clock: Clock,
    meter: Meter,
    *,
    until: float = math.inf,
    keep_tokens: bool = False,
) -> Run:
    """Serve sessions of one turn each at their times, until time is up: what is left is aborted then.

    `core` must read `clock` and run on the device that `meter` measures. Raises ValueError for a request that
    could never run.
    """
    coming = deque(sorted((_request(i, session) for i, session in enumerate(sessions)), key=_arrival))
    held: deque[Request] = deque()
    live: dict[int, _Live] = {}
    run = Run([], [], [], {}, 0.0, 0, 0)
    while (coming or held or core.has_work) and clock.now < until:
        if not core.has_work and not held:
            clock.wait_until(min(coming[0].arrival, until))
        now = clock.now
        while coming and coming[0].arrival <= now:
            held.append(coming.popleft())
        admitted: list[Request] = []
        while held and memory.admit(held[0]):
            request = held.popleft()
            admitted.append(request)
            due, params = request.arrival, request.params
            record = Record(session=request.id, turn=0, due=due, sent=now, prompt_tokens=len(request.prompt))
            live[request.id] = _Live(record, request, params.n, params.n * params.max_tokens)
        for request in memory.begin(admitted):
            core.add(request)
        before = meter.busy_seconds
        outputs = core.step()
        if meter.busy_seconds > before:
            given = memory.slots(core.stats, meter.context)
            waiting = core.stats.waiting + core.stats.swapped
            run.uses.append(
                MemoryUse(
                    seconds=meter.busy_seconds - before,
                    requests=len(live) - waiting,
                    is_short=bool(held) or waiting > 0,
                    blocks=core.stats.active_blocks,
                    references=core.stats.block_references,
                    tokens=given.tokens,
                    reserved=given.reserved,
                    internal=given.internal,
                    others=slots - given.tokens - given.reserved - given.internal,
                )
            )
        padding = 0
        for output in outputs:
            one = live[output.request_id]
            one.record.first = one.record.first or clock.now
            new = min(len(output.tokens), one.wanted)
            one.wanted -= new
            one.record.output_tokens += new
            padding += len(output.tokens) - new
            one.record.cached_tokens += output.cached_tokens
            if keep_tokens:
                run.tokens.setdefault((output.request_id, output.index), []).extend(output.tokens)
            if output.finish_reason is None:
                continue
            one.unfinished -= 1
            if not one.unfinished:
                now = clock.now  # a batch ends at one moment
                for ended in memory.release(one.request):
                    record = live.pop(ended.id).record
                    record.last = now
                    record.sequences = ended.params.n
                    run.records.append(record)
        if core.stats.decode_tokens:
            run.decoded.append((clock.now, max(0, core.stats.decode_tokens - padding)))
    run.seconds = clock.now
    run.preemptions = core.stats.preemptions_recompute + core.stats.preemptions_swap
    run.unfinished = len(live) + len(held) + len(coming)
    for number in live:
        core.abort(number)
    while core.has_work:
        core.step()
    run.records.sort(key=lambda record: record.session)
    return run


def _request(number: int, session: Session) -> Request:
    (turn,) = session.turns
    assert isinstance(turn.prompt, list), "the engine takes token ids"
    beams = turn.beam_width
    params = SamplingParams(
        n=turn.n,
        beam_width=beams,
        temperature=0.0 if beams else 1.0,
        max_tokens=turn.output_len,
        ignore_eos=True,
        seed=number,
    )
    return Request(number, turn.prompt, params, arrival=session.at)


def _arrival(request: Request) -> tuple[float, int]:
    return request.arrival, request.id
