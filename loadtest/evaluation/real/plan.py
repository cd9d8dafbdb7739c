"""List the cases to run, each list in the order of what they are worth, should the time not be enough."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quire.loadtest.evaluation.real.case import Case, Workload
from quire.loadtest.evaluation.shared_prefix import PREFIXES
from quire.loadtest.evaluation.sharing import WIDTHS
from quire.loadtest.simulator.geometry import OPT_13B, kv_slots
from quire.loadtest.simulator.systems import Kind

SLOTS = kv_slots(OPT_13B)  # 12 GB of OPT-13B's keys and values, as the paper had
HOST_SLOTS = 8192
MAX_NUM_SEQS = 256
MAX_MODEL_LEN = MAX_BATCHED_TOKENS = 2048  # the longest that OPT takes; all steps in CUDA graphs
KINDS: tuple[Kind, ...] = ("paged", "oracle", "pow2", "max")
BATCHES: tuple[Kind, ...] = ("padded", "request-level")
OVERLOADS: dict[Workload, float] = {  # requests a second
    "ShareGPT": 10.0,
    "Alpaca": 250.0,
    "translation": 300.0,
    "chatbot": 5.0,
}
OVERLOAD_SECONDS = 60.0
PLAIN_WORKLOADS: tuple[Workload, ...] = ("ShareGPT", "Alpaca")
BLOCK_SIZES = (1, 64, 4, 128, 32, 8, 256, 2)

# Fig. 12's knee by bisection, between these shares of the rate that was sustained under overload.
KNEE_KINDS: tuple[Kind, ...] = ("paged", "oracle")
KNEE_SHARES = (0.7, 2.0)  # a minute at 1.1 of it takes OPT-13B to half of its limit
KNEE_STEPS = 3
KNEE_SECONDS = (60.0, 64.0)  # in which requests come, and after which a run ends
LONG_SHARE, LONG_SECONDS = 0.9, (540.0, 550.0)  # one run, near the knee
LATENCY_LIMITS = {"OPT-13B": 0.04, "Llama-8B": 0.012}  # seconds a token: some times an unloaded one's
OTHERS_LIMIT = 0.04


def latency_limit(model: str) -> float:
    """Return the normalised latency at which the rates of Fig. 12 are compared."""
    return LATENCY_LIMITS.get(model, OTHERS_LIMIT)


def overload(workload: Workload, kind: Kind = "paged", *, block_size: int = 16, n: int = 1) -> Case:
    """Return a case with more requests than any system keeps up with."""
    rate = OVERLOADS[workload]
    return Case(
        workload=workload,
        kind=kind,
        rate=rate / n,
        count=round(rate * OVERLOAD_SECONDS / n),
        until=OVERLOAD_SECONDS,
        slots=SLOTS,
        block_size=block_size,
        n=n,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
    )


def open_loop(overloaded: Case, sustained: float, rate: float, seconds: tuple[float, float]) -> Case:
    """Return a case with another rate, beside what the system sustained when it was overloaded."""
    arrivals, until = seconds
    share = rate / sustained
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
    for workload in PLAIN_WORKLOADS:
        for kind in KINDS:
            yield overload(workload, kind)
    for workload in reversed(PLAIN_WORKLOADS):
        for kind in BATCHES:
            yield overload(workload, kind)


def sharing() -> Iterator[Case]:
    """Yield the cases of Fig. 14 to 17: with Orca (Oracle), then ShareGPT's savings, then the others."""
    for kind in KINDS:
        yield overload("chatbot", kind)
    for length, _ in PREFIXES.values():
        case = msgspec.structs.replace(overload("translation"), shared_prefix=length)
        yield msgspec.structs.replace(case, prefix_caching=True)
        yield msgspec.structs.replace(case, kind="oracle")
    for width in reversed(WIDTHS):
        for kind in KINDS[:2]:
            yield overload("Alpaca", kind, n=width)
            yield with_beams(overload("Alpaca", kind), width)
    for width in reversed(WIDTHS):
        yield overload("ShareGPT", n=width)
        yield with_beams(overload("ShareGPT"), width)
    for width in reversed(WIDTHS):
        for kind in KINDS[2:]:
            yield overload("Alpaca", kind, n=width)
            yield with_beams(overload("Alpaca", kind), width)


def block_size_cases(block_size: int) -> Iterator[Case]:
    """Yield cases of Fig. 18b and 19b: requests that yield are computed again, or go to host memory."""
    case = overload("ShareGPT", block_size=block_size)
    yield case
    yield msgspec.structs.replace(case, host_slots=HOST_SLOTS, preemption="swap")
    yield overload("Alpaca", block_size=block_size)
