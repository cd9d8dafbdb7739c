"""List the cases to run, in the order of what they are worth, should the time not be enough for all."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quire.loadtest.evaluation.real.case import Case, Outcome, Workload
from quire.loadtest.evaluation.shared_prefix import PREFIXES
from quire.loadtest.evaluation.sharing import WIDTHS
from quire.loadtest.simulator.geometry import OPT_13B, kv_slots
from quire.loadtest.simulator.systems import Kind

SLOTS = kv_slots(OPT_13B)  # as many as the paper had, so that as many requests run at once
HOST_SLOTS = 16384
MAX_NUM_SEQS = 256
MAX_MODEL_LEN = MAX_BATCHED_TOKENS = 2048  # the longest that OPT takes; all steps in CUDA graphs
KINDS: tuple[Kind, ...] = ("paged", "oracle", "max", "pow2")
CURVES: tuple[Kind, ...] = ("paged", "oracle")  # latency by rate at all shares
FURTHER_CURVES: tuple[Kind, ...] = ("max",)  # at the first two
OVERLOADS: dict[Workload, tuple[float, float]] = {  # requests a second; seconds
    "ShareGPT": (60.0, 6.5),
    "Alpaca": (900.0, 3.0),
    "translation": (900.0, 2.5),
    "chatbot": (40.0, 6.5),
}
ARRIVALS: dict[Workload, tuple[float, float]] = {"ShareGPT": (7.0, 12.0), "Alpaca": (2.5, 4.5)}
"""Of an open loop: the seconds in which requests come, and those after which it ends."""
SHARES = (1.0, 1.5, 0.6, 2.0)  # of the rate that was sustained under overload
LARGER_BLOCKS = (64, 32, 128)


def overload(workload: Workload, kind: Kind = "paged", *, block_size: int = 16, n: int = 1) -> Case:
    """Return a case with more requests than any system keeps up with."""
    rate, until = OVERLOADS[workload]
    return Case(
        workload=workload,
        kind=kind,
        rate=rate / n,
        count=round(rate * until / n),
        until=until,
        slots=SLOTS,
        block_size=block_size,
        n=n,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
    )


def open_loop(overloaded: Case, outcome: Outcome, share: float) -> Case:
    """Return a case at a `share` of the rate that the system sustained when it was overloaded."""
    arrivals, until = ARRIVALS[overloaded.workload]
    rate = share * outcome.sustained
    return msgspec.structs.replace(
        overloaded, rate=rate, count=max(8, round(rate * arrivals)), until=until, share=share
    )


def with_beams(case: Case, width: int) -> Case:
    return msgspec.structs.replace(
        case, beam_width=width, rate=case.rate / width, count=round(case.count / width)
    )


def warm_ups(block_size: int) -> Iterator[Case]:
    """Yield a second of each kind of request, so that what compiles late does so before time counts."""
    for case in (overload("Alpaca", block_size=block_size), overload("Alpaca", block_size=block_size, n=2)):
        yield msgspec.structs.replace(case, count=min(case.count, 24), until=1.0)
    beams = with_beams(overload("Alpaca", block_size=block_size), 2)
    yield msgspec.structs.replace(beams, count=min(beams.count, 8), until=1.0)


def overloads() -> Iterator[Case]:
    """Yield the cases of Fig. 2 and 13, and those that say where the rates of Fig. 12 lie."""
    for workload in ARRIVALS:
        for kind in KINDS:
            yield overload(workload, kind)


def further_cases() -> Iterator[Case]:
    """Yield the cases of Fig. 14 to 17 and 19b."""
    for width in WIDTHS:
        yield overload("Alpaca", n=width)
        yield with_beams(overload("Alpaca"), width)
    yield overload("Alpaca", "oracle", n=WIDTHS[-1])
    yield with_beams(overload("Alpaca", "oracle"), WIDTHS[-1])
    for length, _ in PREFIXES.values():
        case = msgspec.structs.replace(overload("translation"), shared_prefix=length)
        yield msgspec.structs.replace(case, prefix_caching=True)
        yield msgspec.structs.replace(case, kind="oracle")
    yield from preemptions(16)
    for width in (WIDTHS[0], WIDTHS[-1]):
        yield overload("ShareGPT", n=width)
        yield with_beams(overload("ShareGPT"), width)
    yield overload("chatbot")
    yield overload("chatbot", "oracle")


def preemptions(block_size: int) -> Iterator[Case]:
    """Yield cases of Fig. 19b: requests that yield go to host memory, or are computed again."""
    case = overload("ShareGPT", block_size=block_size)
    for mode in ("swap", "recompute"):
        yield msgspec.structs.replace(case, host_slots=HOST_SLOTS, preemption=mode)


def block_size_cases(block_size: int) -> Iterator[Case]:
    """Yield cases of Fig. 18b, and of 19b where blocks are of another size than the two that matter most."""
    yield overload("ShareGPT", block_size=block_size)
    yield overload("Alpaca", block_size=block_size)
    if block_size == LARGER_BLOCKS[0]:
        yield from preemptions(block_size)
