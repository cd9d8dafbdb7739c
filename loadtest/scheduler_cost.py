"""What a step of scheduling costs: `python -m loadtest.scheduler_cost [--sequences N] [--steps N]`.

Time of `schedule` and of `commit` per step while all sequences decode, without a model: in microseconds, and
as a multiple of a fixed piece of pure Python timed in the same run, which compares between machines.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import numpy as np

from engine.admission import Capacity
from engine.plan import StepPlan, StepResult
from engine.prefix_cache import BlockHasher
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler

CONTEXTS = (256, 2048, 16384)
BLOCK_SIZE = 16
YARDSTICK_ITEMS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=256, help="running at once")
    parser.add_argument("--steps", type=int, default=320, help="timed at each context, after as many untimed")
    arguments = parser.parse_args()
    yardstick = statistics.median(yardstick_seconds() for _ in range(200))
    print(f"yardstick: {yardstick * 1e6:.0f} µs; {arguments.sequences} sequences decode")
    print(
        f"{'context':>8} {'schedule':>10} {'commit':>10} {'median':>10} {'mean':>10} {'p99':>10} {'ratio':>7}"
    )
    for context in CONTEXTS:
        schedule, commit = step_seconds(arguments.sequences, context, arguments.steps)
        both = [sum(pair) for pair in zip(schedule, commit, strict=True)]
        median, mean = statistics.median(both), statistics.mean(both)
        columns = (
            statistics.mean(schedule),
            statistics.mean(commit),
            median,
            mean,
            sorted(both)[-len(both) // 100],
        )
        cells = " ".join(f"{seconds * 1e6:>7.0f} µs" for seconds in columns)
        print(f"{context:>8} {cells} {mean / yardstick:>7.2f}")


def yardstick_seconds() -> float:
    """Time of a loop over a thousand ints: dictionary, list and attribute work, as a scheduler does."""
    begin = time.perf_counter()
    seen: dict[int, list[int]] = {}
    for i in range(YARDSTICK_ITEMS):
        seen.setdefault(i * 7 % 61, []).append(i)
    assert sum(len(items) for items in seen.values()) == YARDSTICK_ITEMS
    return time.perf_counter() - begin


def step_seconds(sequences: int, context: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each `schedule` and `commit` from `context` tokens on, one step ahead as in serving."""
    warm_up = steps
    length = context + warm_up + 2 * steps
    blocks = sequences * -(-length // BLOCK_SIZE) + 1
    capacity = Capacity(blocks, BLOCK_SIZE, sequences, max_model_len=2 * length, vocab_size=1000)
    scheduler = Scheduler(
        capacity, sequences * context, hasher=BlockHasher(BLOCK_SIZE, seed=0)
    )  # one prefill
    params = SamplingParams(max_tokens=warm_up + 2 * steps, ignore_eos=True)
    for i in range(sequences):
        # No two prompts begin alike, and their lengths differ so that each step some sequences take a block.
        scheduler.add(Request(i, [i] + [j % 1000 for j in range(context - 1 - i % BLOCK_SIZE)], params))
    in_flight: StepPlan | None = None
    while scheduler.waiting or any(group.prefill_queue for group in scheduler.running):
        in_flight, _, _ = _step(scheduler, in_flight)
    schedule, commit = [], []
    gc.collect()
    gc.disable()
    for i in range(warm_up + steps):
        in_flight, scheduling, committing = _step(scheduler, in_flight)
        assert in_flight is not None and in_flight.num_decodes == sequences
        if i >= warm_up:
            schedule.append(scheduling)
            commit.append(committing)
    gc.enable()
    return schedule, commit


def _step(scheduler: Scheduler, before: StepPlan | None) -> tuple[StepPlan | None, float, float]:
    """Schedule a step and commit the one before it."""
    begin = time.perf_counter()
    plan = scheduler.schedule()
    scheduled = time.perf_counter()
    if before is None:
        return plan, scheduled - begin, 0.0
    tokens = np.arange(len(before.sample_rows), dtype=np.int32) % 1000
    result = StepResult(tokens, np.empty(0, np.int32), None, ())
    launched = time.perf_counter()
    scheduler.commit(result)
    return plan, scheduled - begin, time.perf_counter() - launched


if __name__ == "__main__":
    main()
