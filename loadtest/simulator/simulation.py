"""A whole run on a virtual clock: requests arrive, the real engine core steps, time is what steps cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from engine.core import EngineCore
from engine.request import Request, SamplingParams
from loadtest.records import Record
from loadtest.sessions import Session
from loadtest.simulator.step_costs import StepCosts
from loadtest.simulator.systems import System
from loadtest.simulator.virtual_runner import VirtualClock, VirtualRunner


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Where the KV slots are during one step. The last four add up to all slots (section 3.1, Fig. 2)."""

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
    """What came of it. Records are in the order of the sessions; tokens by (request, sample)."""

    records: list[Record]
    uses: list[MemoryUse]
    tokens: dict[tuple[int, int], list[int]]
    seconds: float
    preemptions: int

    def mean_requests(self) -> float:
        """Under way at once, over the time in which any is."""
        return self._mean(lambda use: use.requests, lambda use: use.requests > 0)

    def shares_under_load(self) -> dict[str, float]:
        """Parts of the memory while somebody waits for some, in per cent. Empty if nobody ever does."""
        names = ("tokens", "reserved", "internal", "others")
        if not any(use.is_short for use in self.uses):
            return {}
        slots = sum(getattr(self.uses[0], name) for name in names)
        return {name: 100 / slots * self._mean(attrgetter(name), lambda use: use.is_short) for name in names}

    def blocks_saved(self) -> float:
        """Share of blocks that sharing saves, in per cent: (references − blocks) ÷ references (Fig. 15)."""
        everything = self._mean(lambda use: use.references, lambda use: True)
        return 100 * (1 - self._mean(lambda use: use.blocks, lambda use: True) / everything)

    def wasted_in_blocks(self) -> float:
        """Share of the slots given to sequences that hold no token, in per cent."""
        given = self._mean(lambda use: use.tokens + use.internal, lambda use: True)
        return 100 * self._mean(lambda use: use.internal, lambda use: True) / given

    def normalized_latency(self) -> float:
        """Mean, in seconds a token."""
        return float(np.mean([record.normalized_latency for record in self.records]))

    def _mean(self, value: Callable[..., float], when: Callable[[MemoryUse], bool]) -> float:
        chosen = [use for use in self.uses if when(use)]
        weights = np.array([use.seconds for use in chosen])
        return float(np.average([value(use) for use in chosen], weights=weights)) if chosen else 0.0


@dataclass(slots=True)
class _Live:
    record: Record
    request: Request
    unfinished: int  # sequences


def simulate(
    sessions: Sequence[Session], system: System, costs: StepCosts, *, keep_tokens: bool = False
) -> Run:
    """Serve sessions of one turn each, at their times. Raises ValueError for one that could never run."""
    clock = VirtualClock()
    runner = VirtualRunner(costs, clock, system.max_num_seqs)
    core = EngineCore(system.scheduler(), runner, clock)
    memory = system.memory()
    coming = deque(sorted((_request(i, session) for i, session in enumerate(sessions)), key=_arrival))
    held: deque[Request] = deque()
    live: dict[int, _Live] = {}
    records: list[Record] = []
    uses: list[MemoryUse] = []
    tokens: dict[tuple[int, int], list[int]] = {}
    while coming or held or core.has_work:
        if not core.has_work and not held:
            clock.now = max(clock.now, coming[0].arrival)
        while coming and coming[0].arrival <= clock.now:
            held.append(coming.popleft())
        while held and memory.admit(held[0]):
            request = held.popleft()
            due = request.arrival
            record = Record(session=request.id, turn=0, due=due, sent=due, prompt_tokens=len(request.prompt))
            live[request.id] = _Live(record, request, request.params.n)
            core.add(request)
        memory.begin()
        before = runner.busy_seconds
        outputs = core.step()
        if runner.busy_seconds > before:
            given = memory.slots(core.stats, runner.context)
            waiting = core.stats.waiting + core.stats.swapped
            uses.append(
                MemoryUse(
                    seconds=runner.busy_seconds - before,
                    requests=len(live) - waiting,
                    is_short=bool(held) or waiting > 0,
                    blocks=core.stats.active_blocks,
                    references=core.stats.block_references,
                    tokens=given.tokens,
                    reserved=given.reserved,
                    internal=given.internal,
                    others=system.slots - given.tokens - given.reserved - given.internal,
                )
            )
        for output in outputs:
            one = live[output.request_id]
            one.record.first = one.record.first or clock.now
            one.record.output_tokens += len(output.tokens)
            one.record.cached_tokens += output.cached_tokens
            if keep_tokens:
                tokens.setdefault((output.request_id, output.index), []).extend(output.tokens)
            if output.finish_reason is None:
                continue
            one.unfinished -= 1
            if not one.unfinished:
                for ended in memory.release(one.request):
                    record = live.pop(ended.id).record
                    record.last = clock.now
                    record.sequences = ended.params.n
                    records.append(record)
    records.sort(key=lambda record: record.session)
    preemptions = core.stats.preemptions_recompute + core.stats.preemptions_swap
    return Run(records, uses, tokens, clock.now, preemptions)


def _request(number: int, session: Session) -> Request:
    (turn,) = session.turns
    assert isinstance(turn.prompt, list), "the simulator takes token ids"
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
