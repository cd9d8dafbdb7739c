"""The gated delta rule of chunks in their order, each by a few products with the state (Yang et al. 2024)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.recurrence.delta_products import products_of_chunks
from quire.kernels.recurrence.step import CARRIED, CHUNK

# Of a value's numbers that a program has the state of: with 32 heads of 128 numbers 128 programs, each alone
# on a multiprocessor. Their loops over chunks are what a long prompt's step takes.
SLICE, SLICE_OF_WIDE = 32, 16  # of keys with up to 128 numbers, and with more
WARPS, WARPS_OF_WIDE = 4, 8  # likewise
MOST_TOGETHER = 160  # chunks whose products are in memory at a time: 0.5 GB of 32 heads of 128 numbers
AHEAD = 64  # chunks among which a program looks for the end of those that go on from one another


def delta_rule_of_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    chunks: Tensor,
    used: Tensor,
    out: Tensor,
    *,
    normalised: bool,
) -> None:
    """Compute the tokens of chunks [C, 4], at least one: `delta_rule.gated_delta_rule` has the shapes.

    used [1] i32: all chunks behind so many pad. What a chunk's products are without the state is
    computed for many of them ahead, see `delta_products`.
    """
    heads, key_dim, value_dim = state.shape[1:]
    exact = q.dtype == torch.float32
    keys = max(triton.next_power_of_2(key_dim), 16)
    width = slice_of(keys)
    carried = state.new_empty(state.shape[1:]) if len(chunks) > MOST_TOGETHER else None
    for first, part in zip(range(0, len(chunks), MOST_TOGETHER), chunks.split(MOST_TOGETHER), strict=True):
        left = used - first if first else used
        products = products_of_chunks(q, k, v, g, beta, part, normalised=normalised)
        _scan_kernel[(triton.cdiv(value_dim, width), heads)](
            *products, state, carried, part, out, left, len(part), state.stride(0), heads, key_dim, value_dim,
            keys, width, CHUNK, CARRIED, AHEAD, num_warps=warps_of(keys),
            num_stages=stages_of(keys, exact=exact),
        )  # fmt: skip


def slice_of(keys: int) -> int:
    """Return of how many of a value's numbers a program has the state, which has so many rows."""
    return SLICE if keys <= 128 else SLICE_OF_WIDE


def warps_of(keys: int) -> int:
    """Return how many warps a program has, whose state has so many rows."""
    return WARPS if keys <= 128 else WARPS_OF_WIDE


def stages_of(keys: int, *, exact: bool) -> int:
    """Return of how many chunks shared memory holds products at a time, with keys of so many numbers."""
    return 1 if exact or keys > 128 else 2


@triton.jit(do_not_specialize=["most"])
def _scan_kernel(
    queries_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    state_ptr: tl.tensor,
    carried_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    used_ptr: tl.tensor,
    most: tl.tensor,
    state_stride: tl.tensor,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    SLICE: tl.constexpr,
    CHUNK: tl.constexpr,
    CARRIED: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    """Go through all chunks with a slice of a head's state, which stays in registers.

    The outer loop is over runs of chunks that go on from one another. So the inner one, over a run's chunks,
    neither reads nor writes states: all that it reads is known ahead, and is fetched while it multiplies.
    """
    head = tl.program_id(1)
    row = tl.arange(0, CHUNK)
    key = tl.arange(0, KEYS)
    value = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    in_key, in_value = key < KEY_DIM, value < VALUE_DIM
    inside = in_key[:, None] & in_value[None, :]
    places = head * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
    by_key = row[:, None] * KEY_DIM + key[None, :]
    by_value = row[:, None] * VALUE_DIM + value[None, :]
    by_token = row[:, None] * CHUNK + row[None, :]
    if carried_ptr is not None:  # what the chunks before these left, if they go on from it
        state = tl.load(carried_ptr + places, inside, other=0.0)
    else:
        state = tl.zeros((KEYS, SLICE), tl.float32)
    begin = 0
    count = tl.minimum(tl.load(used_ptr), most)
    while begin < count:
        ahead = begin + tl.arange(0, AHEAD)
        tokens = tl.load(chunks_ptr + 4 * begin + 1)
        pads = tl.load(chunks_ptr + 4 * ahead + 1, ahead < count, other=0) == 0
        others_pad = tl.load(chunks_ptr + 4 * ahead + 5, ahead + 1 < count, other=0) == 0
        nexts = tl.load(chunks_ptr + 4 * ahead + 6, ahead + 1 < count, other=0)
        afters = tl.load(chunks_ptr + 4 * ahead + 3, ahead < count, other=0)
        ends = (pads != others_pad) | (~pads & ((afters >= 0) | (nexts != CARRIED))) | (ahead + 1 >= count)
        end = tl.min(tl.where(ends, ahead, begin + AHEAD - 1)) + 1
        if tokens > 0:
            before = tl.load(chunks_ptr + 4 * begin + 2).to(tl.int64)
            if before != CARRIED:
                state = tl.load(state_ptr + before * state_stride + places, inside & (before >= 0), other=0.0)
            for chunk in range(begin, end):
                place = chunk * HEADS + head.to(tl.int64)
                reads = tl.load(reads_ptr + place * CHUNK * KEY_DIM + by_key, in_key[None, :], other=0.0)
                values = tl.load(
                    values_ptr + place * CHUNK * VALUE_DIM + by_value, in_value[None, :], other=0.0
                )
                queries = tl.load(queries_ptr + place * CHUNK * KEY_DIM + by_key, in_key[None, :], other=0.0)
                scores = tl.load(scores_ptr + place * CHUNK * CHUNK + by_token)
                keys = tl.load(keys_ptr + place * CHUNK * KEY_DIM + by_key, in_key[None, :], other=0.0)
                decays = tl.load(decays_ptr + place * KEY_DIM + key, in_key, other=0.0)
                held = state.to(reads.dtype)
                changes = (values - tl.dot(reads, held, input_precision="ieee")).to(reads.dtype)
                result = tl.dot(queries, held, input_precision="ieee")
                result = tl.dot(scores, changes, result, input_precision="ieee")
                state = tl.dot(tl.trans(keys), changes, state * decays[:, None], input_precision="ieee")
                first = tl.load(chunks_ptr + 4 * chunk).to(tl.int64)
                of_chunk = row < tl.load(chunks_ptr + 4 * chunk + 1)
                out = out_ptr + ((first + row[:, None]) * HEADS + head) * VALUE_DIM + value[None, :]
                tl.store(out, result, of_chunk[:, None] & in_value[None, :])
            after = tl.load(chunks_ptr + 4 * end - 1).to(tl.int64)
            tl.store(state_ptr + after * state_stride + places, state, inside & (after >= 0))
            tl.debug_barrier()  # a later chunk may go on from that block, which other threads wrote parts of
        begin = end
    if carried_ptr is not None:
        tl.store(carried_ptr + places, state, inside)
