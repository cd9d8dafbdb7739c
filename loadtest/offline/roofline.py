"""Reckon what a step has to read and to compute, and how long that takes at least (Williams 2009)."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass

import numpy as np
import torch

from quire.engine.arrays import Int32
from quire.engine.config import EngineInfo
from quire.engine.schedule.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured on the device: bytes/s of a large copy (read + written), FLOP/s of a matrix product."""

    bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes and FLOP of a step, or the mean of several; weights and shared blocks are read once."""

    weight_bytes: float
    prefill_tokens: float
    prefill_bytes: float  # keys and values, read or written
    prefill_flops: float  # products with weights, and attention
    decode_tokens: float
    decode_bytes: float
    decode_flops: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.prefill_bytes + self.decode_bytes

    @property
    def flops(self) -> float:
        return self.prefill_flops + self.decode_flops

    def seconds(self, ceilings: Ceilings) -> float:
        """Return the seconds of a step, which may compute while it reads."""
        return max(self.bytes / ceilings.bandwidth, self.flops / ceilings.flops)


NOTHING = Needs(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def mean(needs: Iterable[Needs]) -> Needs:
    """Return the mean of one step or more, to a tenth."""
    return Needs(*(round(statistics.fmean(column), 1) for column in zip(*map(astuple, needs), strict=True)))


def needs_of(plan: StepPlan | None, tokens_filled: int, info: EngineInfo) -> Needs:
    """Reckon what a step that launches `plan`, if any, needs, with `tokens_filled` in all distinct blocks by
    then.

    The last layer owes a prompt's tokens no more than K and V, bar the newest, which is not counted for it
    either. Nor is what little norms, activations and sampling compute, and what goes from kernel to kernel.
    """
    if plan is None or not plan.num_tokens:
        return NOTHING
    decodes, prefills = slice(plan.num_decodes), slice(plan.num_decodes, None)
    prefill_tokens, layers = len(plan.prefill_tokens), len(info.windows)
    decode_keys, decode_pairs = _attention(plan, decodes, info.windows)
    prefill_keys, prefill_pairs = _attention(plan, prefills, info.windows[:-1])
    prefill_keys += prefill_tokens  # in the last layer they are written only
    distinct = min(1.0, tokens_filled / plan.context_lens.sum())
    key_bytes = distinct * info.bytes_per_block * info.capacity.pages / info.block_size / layers
    dtype: torch.dtype = getattr(torch, info.dtype)
    sampled = len(np.unique(plan.sample_tokens[plan.sample_tokens >= plan.num_decodes]))
    # A product and a sum for each weight; as many for a pair's score, and for its value.
    layer, pair = 2 * info.layer_weights, 4 * info.query_width
    head = 2 * info.head_weight_bytes / dtype.itemsize
    return Needs(
        weight_bytes=info.body_weight_bytes + info.head_weight_bytes,
        prefill_tokens=prefill_tokens,
        prefill_bytes=prefill_keys * key_bytes,
        prefill_flops=layer * prefill_tokens * (layers - 1) + head * sampled + pair * prefill_pairs,
        decode_tokens=plan.num_decodes,
        decode_bytes=decode_keys * key_bytes,
        decode_flops=(layer * layers + head) * plan.num_decodes + pair * decode_pairs,
    )


def _attention(plan: StepPlan, rows: slice, windows: tuple[int, ...]) -> tuple[float, float]:
    """Return keys that these rows see, and (query, key) pairs, of all layers with these windows."""
    keys = pairs = 0.0
    for window, layers in Counter(windows).items():
        seen, paired = _seen(plan.query_lens[rows], plan.context_lens[rows], window)
        keys += layers * seen
        pairs += layers * paired
    return keys, pairs


def _seen(query_lens: Int32, context_lens: Int32, window: int) -> tuple[float, float]:
    """Return keys, and (query, key) pairs, of one layer: a query sees itself and its window before it."""
    queries, contexts = query_lens.astype(np.float64), context_lens.astype(np.float64)
    reach = window or np.inf
    keys = np.minimum(contexts, reach + queries - 1)
    cut = np.clip(contexts - reach, 0, queries)  # queries that see a full window, the newest ones
    whole = queries - cut  # these see all up to themselves: first .. first + whole - 1 keys
    first = contexts - queries + 1
    pairs = whole * first + whole * (whole - 1) / 2
    if window:
        pairs += cut * window
    return float(keys.sum()), float(pairs.sum())


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Time a large copy and a large matrix product, best of five."""
    cuda = device.type == "cuda"
    source = torch.empty((1 << 31 if cuda else 1 << 27) // 4, device=device)
    target = torch.empty_like(source)
    side = 8192 if cuda else 512  # a CPU may need seconds for a larger product in bfloat16
    a = torch.randn(side, side, device=device).to(dtype)
    copy = _best_time(lambda: target.copy_(source), device)
    product = _best_time(lambda: a @ a, device)
    return Ceilings(2 * source.nbytes / copy, 2 * side**3 / product)


def _best_time(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of `work`; on a GPU of several in a row, so that asking for one hardly counts."""
    cuda = device.type == "cuda"
    calls = 8 if cuda else 1
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        if cuda:
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begin) / calls)
    return min(times[1:])
