"""One run of an experiment: what is served, under which memory, for how long; and what came of it.

A case says all that it takes to repeat it, on a real engine or by simulation.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec
import numpy as np

from quire.engine.config import PreemptionMode
from quire.loadtest.client.arrivals import arrival_times
from quire.loadtest.client.lengths import ALPACA, SHAREGPT
from quire.loadtest.client.sessions import Recipe, Session, draw_sessions, due_at
from quire.loadtest.evaluation.chatbot import conversations
from quire.loadtest.evaluation.shared_prefix import SENTENCES
from quire.loadtest.simulator.serving import Run
from quire.loadtest.simulator.systems import NAMES, Kind, System

SHAPES = {"ShareGPT": SHAREGPT, "Alpaca": ALPACA, "translation": SENTENCES}
Workload = Literal["ShareGPT", "Alpaca", "translation", "chatbot"]


class Case(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`count` requests at `rate` a second, by a Poisson schedule; what is left after `until` s is aborted.

    `share`: of the rate that the system sustained when it was overloaded; None where this is an overload.
    """

    workload: Workload
    kind: Kind
    rate: float
    count: int
    until: float
    slots: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    share: float | None = None
    block_size: int = 16
    n: int = 1
    beam_width: int = 0
    shared_prefix: int = 0
    prefix_caching: bool = False
    host_slots: int = 0
    preemption: PreemptionMode = "recompute"
    seed: int = 0

    def __str__(self) -> str:
        words = [self.workload, NAMES[self.kind], f"{self.rate:.3g} requests/s"]
        words += [f"{self.n} samples"] if self.n > 1 else []
        words += [f"{self.beam_width} beams"] if self.beam_width else []
        words += [f"prefix of {self.shared_prefix}"] if self.shared_prefix else []
        words += ["prefix cache"] if self.prefix_caching else []
        words += [self.preemption] if self.host_slots else []
        return ", ".join(words) + f", blocks of {self.block_size}"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`sustained`: requests a second, by what was decoded in the second half of the time. Of batches of whole
    requests, which are few: by those that ended after the first.

    A request that was cut off counts in the latency with the time it had had by then, so the true mean is
    higher where many were.
    """

    sustained: float
    normalized_latency: float  # mean, seconds a token
    mean_requests: float
    shares: dict[str, float]
    blocks_saved: float
    wasted_in_blocks: float
    preemptions: int
    cached_tokens: int
    finished: int
    unfinished: int
    seconds: float


class CaseRun(msgspec.Struct, frozen=True, kw_only=True):
    """One line of runs.jsonl."""

    case: Case
    outcome: Outcome


class Server(Protocol):
    """A real engine, or a simulated one."""

    def run(self, sessions: list[Session], system: System, until: float) -> Run: ...


def sessions_of(case: Case) -> list[Session]:
    """Return the sessions of a case: the same for every system, as far as their rates and counts are."""
    times = arrival_times(case.count, case.rate, 1.0, case.seed)
    if case.workload == "chatbot":
        return due_at(conversations(case.count, case.seed), times)
    recipe = Recipe(
        SHAPES[case.workload],
        case.count,
        case.seed,
        n=case.n,
        beam_width=case.beam_width,
        shared_prefix=case.shared_prefix,
    )
    return due_at(draw_sessions(recipe), times)


def system_of(case: Case) -> System:
    return System(
        case.kind,
        case.slots,
        case.max_model_len,
        case.block_size,
        case.max_num_seqs,
        case.max_num_batched_tokens,
        case.prefix_caching,
        case.host_slots,
        case.preemption,
    )


def measure(server: Server, case: Case) -> Outcome:
    sessions = sessions_of(case)
    run = server.run(sessions, system_of(case), case.until)
    # A sequence's first token comes from the prefill.
    decodes = max(case.n, case.beam_width) * np.mean(
        [session.turns[0].output_len - 1 for session in sessions]
    )
    latencies = [record.normalized_latency for record in run.records]
    ended = {record.session for record in run.records}
    latencies += [
        (run.seconds - session.at) / session.turns[0].output_len
        for number, session in enumerate(sessions)
        if number not in ended and session.at < run.seconds
    ]
    in_batches = case.kind in ("padded", "request-level")
    return Outcome(
        sustained=run.batch_rate() if in_batches else run.decode_rate(run.seconds / 2) / float(decodes),
        normalized_latency=float(np.mean(latencies)),
        mean_requests=run.mean_requests(),
        shares=run.shares_under_load(),
        blocks_saved=run.blocks_saved(),
        wasted_in_blocks=run.wasted_in_blocks(),
        preemptions=run.preemptions,
        cached_tokens=sum(record.cached_tokens for record in run.records),
        finished=len(run.records),
        unfinished=run.unfinished,
        seconds=run.seconds,
    )
