"""Mamba 2's scan of chunks of prompts, as products of matrices (Dao and Gu 2024, section 6)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.recurrence.step import CHUNK, NO_STATE
from quire.kernels.recurrence.time_steps import time_steps

# A program has a slice of a head's rows, the narrowest of which there are no more than run at a time: two on
# each of an H100's multiprocessors, of which one computes while the other waits.
PROGRAMS = 264
NARROWEST_SLICE = 16
NUMBERS = 8192  # of a state that a program has in registers at most, 64 a thread
WARPS = 4  # more would compute the same twice: products of 64 rows are four warps'
STAGES = 2  # tokens are loaded one turn ahead
# Of bf16 tokens, products of fp32 numbers are those of so many bf16 parts: 2 keep 16 bits, 1 keeps 8.
PARTS = 2

_NO_STATE = tl.constexpr(NO_STATE)


def chunk_tile(heads: int, rows: int, columns: int) -> dict[str, int]:
    """Return how much of a head's state a program of `chunk_kernel` has, padded to what is multiplied."""
    padded = max(triton.next_power_of_2(columns), 16)
    tile = min(max(triton.next_power_of_2(rows), NARROWEST_SLICE), max(NUMBERS // padded, NARROWEST_SLICE))
    while tile > NARROWEST_SLICE and heads * triton.cdiv(rows, tile // 2) <= PROGRAMS:
        tile //= 2
    return {"TILE_ROWS": tile, "TILE_COLUMNS": padded, "TOKENS": CHUNK}


def chunk_options(dtype: torch.dtype) -> dict[str, int | str]:
    """Return how `chunk_kernel` multiplies tokens of a dtype by fp32 numbers, and how it is launched."""
    return {
        "PARTS": PARTS if dtype == torch.bfloat16 else 0,  # parts of fp32 numbers are beyond fp16's range
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
        "num_warps": WARPS,
        "num_stages": 1 if dtype == torch.float32 else STAGES,  # two of fp32 tokens are too much memory
    }


@triton.jit
def _upper_half(x: tl.tensor) -> tl.tensor:
    """Return fp32 numbers cut to what bf16 has of them: rounding those alone takes far longer."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _product(
    left: tl.tensor, right: tl.tensor, total: tl.tensor, PARTS: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """Return left @ right + total, where one of the two is of tokens, as they are, and the other in fp32."""
    if PARTS == 0:
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision=PRECISION)
    elif left.dtype == tl.float32:
        for _ in tl.static_range(PARTS - 1):
            part = _upper_half(left)
            total = tl.dot(part.to(tl.bfloat16), right, total)
            left -= part
        total = tl.dot(left.to(tl.bfloat16), right, total)
    else:
        for _ in tl.static_range(PARTS - 1):
            part = _upper_half(right)
            total = tl.dot(left, part.to(tl.bfloat16), total)
            right -= part
        total = tl.dot(left, right.to(tl.bfloat16), total)
    return total


@triton.jit
def _rows_of(
    ptr: tl.tensor,
    stride: tl.constexpr,
    first: tl.tensor,
    count: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """Return columns of a chunk's tokens, zeros behind them."""
    token = tl.arange(0, TOKENS)
    places = ptr + first.to(tl.int64) * stride + token.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(places, (token < count)[:, None] & inside[None, :], other=0.0)


@triton.jit
def _sum_and_last(total: tl.tensor, _: tl.tensor, more: tl.tensor, last: tl.tensor) -> tuple[tl.tensor, ...]:
    """Add up the first of a pair and leave the second as it is.

    So the compiler has steps once, as it does sums: else each thread computes those of the columns it has.
    """
    return total + more, last


@triton.jit
def _dt_of(
    ptr: tl.tensor, stride: tl.constexpr, first: tl.tensor, count: tl.tensor, TOKENS: tl.constexpr
) -> tl.tensor:
    token = tl.arange(0, TOKENS)
    return tl.load(ptr + (first + token).to(tl.int64) * stride, token < count, other=0.0)


@triton.jit
def _end_of_run(chunks_ptr: tl.tensor, begin: tl.tensor, chunks: tl.tensor) -> tl.tensor:
    """Return the first chunk behind `begin` that goes on from a block, or how many chunks there are."""
    end = chunks
    at = begin + 1
    while at < end:
        some = at + tl.arange(0, 128)
        before = tl.load(chunks_ptr + 4 * some + 2, some < chunks, other=-1)
        end = tl.min(tl.where(before >= 0, some, chunks), 0)
        at += 128
    return end


@triton.jit(do_not_specialize=["chunks"])
def chunk_kernel(
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    d_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    out_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    chunks: tl.tensor,
    x_stride: tl.constexpr,
    dt_stride: tl.constexpr,
    b_stride: tl.constexpr,
    c_stride: tl.constexpr,
    state_stride: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    HEADS: tl.constexpr,
    SHARING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS).to(tl.int64)
    column = tl.arange(0, TILE_COLUMNS).to(tl.int64)
    there, inside = row < ROWS, column < COLUMNS
    if ROWS % TILE_ROWS == 0:
        there = tl.full([TILE_ROWS], True, tl.int1)
    token = tl.arange(0, TOKENS)
    rate = tl.load(a_ptr + head).to(tl.float32)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + head).to(tl.float32)
    skip = 0.0
    if d_ptr is not None:
        skip = tl.load(d_ptr + head).to(tl.float32)
    x_ptr += head * ROWS
    dt_ptr += head
    b_ptr += head // SHARING * COLUMNS
    c_ptr += head // SHARING * COLUMNS
    out_ptr += head * ROWS
    # The state lies transposed, so that products have a chunk's tokens or a state's columns as their rows,
    # which are many.
    places = (head * ROWS + row)[None, :] * COLUMNS + column[:, None]
    whole = inside[:, None] & there[None, :]
    state = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)

    # In runs, of which each begins with a chunk that goes on from a block: one ahead may have left its state.
    begin = 0
    while begin < chunks:
        described = chunks_ptr + 4 * begin
        first, count = tl.load(described), tl.load(described + 1)
        before, after = tl.load(described + 2), tl.load(described + 3)
        tl.debug_barrier()  # all of what was stored before is there to be loaded
        if (before >= 0) & (count > 0):
            own = state_ptr + before.to(tl.int64) * state_stride + places
            state = tl.load(own, whole, other=0.0).to(tl.float32)
        end = _end_of_run(chunks_ptr, begin, chunks)
        dt = _dt_of(dt_ptr, dt_stride, first, count, TOKENS)
        for chunk in tl.range(begin, end):
            # The compiler loads tokens a turn ahead; so what says where they lie is loaded before.
            x = _rows_of(x_ptr, x_stride, first, count, row, there, TOKENS)
            b = _rows_of(b_ptr, b_stride, first, count, column, inside, TOKENS)
            c = _rows_of(c_ptr, c_stride, first, count, column, inside, TOKENS)
            described = chunks_ptr + 4 * tl.minimum(chunk + 1, end - 1)
            next_first, next_count = tl.load(described), tl.load(described + 1)
            next_before, next_after = tl.load(described + 2), tl.load(described + 3)
            next_dt = _dt_of(dt_ptr, dt_stride, next_first, next_count, TOKENS)

            # Logarithms of decays from the chunk's begin through each token; behind the tokens none decays.
            steps = tl.where(token < count, time_steps(dt, bias, low, high), 0.0)
            decayed, steps = tl.associative_scan((steps * rate, steps), 0, _sum_and_last)
            in_all = tl.sum(tl.where(token == TOKENS - 1, decayed, 0.0), 0)
            if (before == _NO_STATE) & (count > 0):
                state = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
            nothing = tl.zeros([TOKENS, TILE_ROWS], tl.float32)
            out = _product(c, state, nothing, PARTS, PRECISION) * tl.exp(decayed)[:, None]

            # Within the chunk: of later tokens nothing, and D x is a token's own.
            seen = token[:, None] >= token[None, :]
            between = tl.exp(tl.where(seen, decayed[:, None] - decayed[None, :], float("-inf")))
            weights = tl.dot(c, tl.trans(b), input_precision=PRECISION) * between * steps[None, :]
            weights += tl.where(token[:, None] == token[None, :], skip, 0.0)
            out = _product(weights, x, out, PARTS, PRECISION)
            lines = (
                first.to(tl.int64) * (HEADS * ROWS)
                + token.to(tl.int64)[:, None] * (HEADS * ROWS)
                + row[None, :]
            )
            tl.store(out_ptr + lines, out, (token < count)[:, None] & there[None, :])

            left = x.to(tl.float32) * (steps * tl.exp(in_all - decayed))[:, None]
            state = _product(tl.trans(b), left, state * tl.exp(in_all), PARTS, PRECISION)
            held = state.to(state_ptr.dtype.element_ty)
            state = held.to(tl.float32)  # else it would matter where a step ends
            if (after >= 0) & (count > 0):
                tl.store(state_ptr + after.to(tl.int64) * state_stride + places, held, whole)
            first, count, before, after = next_first, next_count, next_before, next_after
            dt = next_dt
        begin = end
