"""What a preemption costs by swapping and by recomputing, measured at start."""

from __future__ import annotations

import time

import msgspec
import numpy as np

from quire.engine.device.limits import Limits
from quire.engine.device.runner import ModelRunner
from quire.engine.dummy_steps import largest_step
from quire.engine.schedule.plan import Runner, StepPlan
from quire.engine.schedule.preemption import PreemptionPolicy

TIMED_BLOCKS = 64  # moved to time the link to host memory
# Prefilled, without a graph, to time a recompute. On a GPU so many that launching them takes no longer than
# computing them, but for small models: there it is the launches that are timed. On a CPU more only while
# fewer are quick: it may take 20 ms for each token of a small model in bfloat16.
TIMED_TOKENS = {"cuda": (2048,), "cpu": (8, 64, 512)}
QUICK_SECONDS = 0.1
# Times as many tokens stand before the chunk that is timed once more, for what its attention takes: a prefill
# of 100,000 tokens takes several times as long a token as one of 2,048.
LONGER_CONTEXT = 8


def measure_costs(runner: ModelRunner, num_blocks: int, all_ranks: Runner | None = None) -> PreemptionPolicy:
    """Time a transfer of a few blocks and two prefills: what a preemption costs either way.

    all_ranks: what launches on every rank, if `runner` is one of several.
    """
    assert runner.cache.host is not None
    count = min(TIMED_BLOCKS, num_blocks, len(runner.cache.host))
    blocks = np.arange(count, dtype=np.int32)
    pairs = np.stack([blocks, blocks], axis=1)
    nothing = largest_step(Limits(1, 1, 1), sampled=1)
    transfer = msgspec.structs.replace(nothing, swap_out=pairs)
    launching = all_ranks or runner
    seconds = [_best_seconds(launching, plan) for plan in (transfer, nothing)]
    per_token, per_pair = _prefill_costs(runner, launching)
    return PreemptionPolicy(
        seconds_per_block=max(seconds[0] - seconds[1], 0.0) / count,
        seconds_per_token=per_token,
        seconds_per_pair=per_pair,
    )


def _prefill_costs(runner: ModelRunner, launching: Runner) -> tuple[float, float]:
    """Seconds a token, and for each one before it: of the longest prefill that is timed.

    As a prompt's beginning, and far behind one: what comes between costs the same a token, but for attention.
    """
    most = min(runner.limits.max_num_batched_tokens, runner.limits.max_model_len)
    for count in TIMED_TOKENS[runner.device.type]:
        tokens = min(count, most)
        chunk = largest_step(Limits(1, tokens, tokens), sampled=1)
        seconds = _best_seconds(launching, chunk)
        if tokens == most or seconds > QUICK_SECONDS:
            break
    before = min(LONGER_CONTEXT * tokens, runner.limits.max_model_len - tokens)
    per_pair = 0.0
    if before > 0:
        farther = msgspec.structs.replace(chunk, context_lens=chunk.context_lens + np.int32(before))
        per_pair = max(_best_seconds(launching, farther, times=2) - seconds, 0.0) / (tokens * before)
    return max(seconds / tokens - per_pair * tokens / 2, 0.0), per_pair


def _best_seconds(runner: Runner, plan: StepPlan, times: int = 3) -> float:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        handle = runner.launch(plan)
        handle.wait()
        handle.has_moved(wait=True)
        taken.append(time.perf_counter() - begin)
    return min(taken)
