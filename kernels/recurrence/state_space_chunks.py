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
WIDEST = 128  # columns of a state that are multiplied at once
PART = 64  # columns of each part of a wider state: registers hold a chunk's tokens of so many
WARPS = 4  # more would compute the same twice: products of 64 rows are four warps'
STAGES = 2  # tokens are loaded one turn ahead

_NO_STATE = tl.constexpr(NO_STATE)


def chunk_tile(heads: int, rows: int, columns: int) -> dict[str, int]:
    """Return how much of a head's state a program of `chunk_kernel` has, padded to what is multiplied."""
    padded = max(triton.next_power_of_2(columns), 16)
    tile = min(max(triton.next_power_of_2(rows), NARROWEST_SLICE), max(NUMBERS // padded, NARROWEST_SLICE))
    while tile > NARROWEST_SLICE and heads * triton.cdiv(rows, tile // 2) <= PROGRAMS:
        tile //= 2
    width = padded if padded <= WIDEST else PART
    parts = triton.cdiv(columns, width)
    return {"TILE_ROWS": tile, "TILE_COLUMNS": width, "PARTS": parts, "TOKENS": CHUNK}


def chunk_options(dtype: torch.dtype) -> dict[str, int | str]:
    """Return how `chunk_kernel` multiplies tokens of a dtype by fp32 numbers, and how it is launched."""
    return {
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
        "num_warps": WARPS,
        "num_stages": 1 if dtype == torch.float32 else STAGES,  # two of fp32 tokens are too much memory
    }


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
def _inside(
    column: tl.tensor, COLUMNS: tl.constexpr, TILE_COLUMNS: tl.constexpr, PARTS: tl.constexpr
) -> tl.tuple:
    """Return which columns of each part are a state's."""
    inside: tl.tuple = ()
    for part in tl.static_range(PARTS):
        inside += (column < COLUMNS - part * TILE_COLUMNS,)
    return inside


@triton.jit
def _nothing(TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, PARTS: tl.constexpr) -> tl.tuple:
    """Return the parts of a state of zeros."""
    state: tl.tuple = ()
    for _ in tl.static_range(PARTS):
        state += (tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32),)
    return state


@triton.jit
def _held(
    ptr: tl.tensor,
    places: tl.tensor,
    whole: tl.tuple,
    TILE_COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tuple:
    """Return the parts of a state that a block holds."""
    state: tl.tuple = ()
    for part in tl.static_range(PARTS):
        own = ptr + part * TILE_COLUMNS + places
        state += (tl.load(own, whole[part], other=0.0).to(tl.float32),)
    return state


@triton.jit
def _behind_chunk(
    state: tl.tensor,
    x: tl.tensor,
    b: tl.tensor,
    steps: tl.tensor,
    decayed: tl.tensor,
    in_all: tl.tensor,
    HELD: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Return what a chunk leaves of a part of a state, rounded as blocks hold it."""
    left = x.to(tl.float32) * (steps * tl.exp(in_all - decayed))[:, None]
    wide = tl.trans(b).to(tl.float32)
    state = tl.dot(wide, left, state * tl.exp(in_all), input_precision=PRECISION)
    return state.to(HELD).to(tl.float32)  # else it would matter where a step ends


@triton.jit
def _keep(
    state: tl.tensor,
    ptr: tl.tensor,
    stride: tl.tensor,
    after: tl.tensor,
    count: tl.tensor,
    places: tl.tensor,
    whole: tl.tensor,
) -> None:
    """Store a part of a state in the block that a chunk leaves it in, if in one."""
    if (after >= 0) & (count > 0):
        own = ptr + after.to(tl.int64) * stride + places
        tl.store(own, state.to(ptr.dtype.element_ty), whole)


@triton.jit
def time_steps_kernel(
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    dt_stride: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Compute the time steps of a chunk and a head, and sums through each of logarithms of decays.

    Behind the chunk's tokens nothing decays.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(chunks_ptr + 4 * chunk), tl.load(chunks_ptr + 4 * chunk + 1)
    token = tl.arange(0, TOKENS)
    dt = tl.load(dt_ptr + (first + token).to(tl.int64) * dt_stride + head, token < count, other=0.0)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + head).to(tl.float32)
    steps = tl.where(token < count, time_steps(dt, bias, low, high), 0.0)
    decayed = tl.cumsum(steps * tl.load(a_ptr + head).to(tl.float32), 0)
    steps_ptr += (chunk.to(tl.int64) * HEADS + head) * (2 * TOKENS) + token
    tl.store(steps_ptr, steps)
    tl.store(steps_ptr + TOKENS, decayed)


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


@triton.jit
def chunk_kernel(
    x_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    d_ptr: tl.tensor,
    state_ptr: tl.tensor,
    out_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    used_ptr: tl.tensor,
    x_stride: tl.constexpr,
    b_stride: tl.constexpr,
    c_stride: tl.constexpr,
    state_stride: tl.tensor,
    HEADS: tl.constexpr,
    SHARING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    LAST: tl.constexpr = PARTS - 1
    HELD: tl.constexpr = state_ptr.dtype.element_ty
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS).to(tl.int64)
    column = tl.arange(0, TILE_COLUMNS).to(tl.int64)
    there, inside = row < ROWS, _inside(column, COLUMNS, TILE_COLUMNS, PARTS)
    if ROWS % TILE_ROWS == 0:
        there = tl.full([TILE_ROWS], True, tl.int1)
    token = tl.arange(0, TOKENS)
    skip = 0.0
    if d_ptr is not None:
        skip = tl.load(d_ptr + head).to(tl.float32)
    x_ptr += head * ROWS
    steps_ptr += head * (2 * TOKENS)
    b_ptr += head // SHARING * COLUMNS
    c_ptr += head // SHARING * COLUMNS
    out_ptr += head * ROWS
    # The state lies transposed, so that products have a chunk's tokens or a state's columns as their rows,
    # which are many. It is a tuple of parts, each of so many columns as are multiplied at once.
    places = (head * ROWS + row)[None, :] * COLUMNS + column[:, None]
    whole: tl.tuple = ()
    for part in tl.static_range(PARTS):
        whole += (inside[part][:, None] & there[None, :],)
    state = _nothing(TILE_ROWS, TILE_COLUMNS, PARTS)

    # In runs, of which each begins with a chunk that goes on from a block: one ahead may have left its state.
    begin = 0
    chunks = tl.load(used_ptr)
    while begin < chunks:
        described = chunks_ptr + 4 * begin
        first, count = tl.load(described), tl.load(described + 1)
        before, after = tl.load(described + 2), tl.load(described + 3)
        tl.debug_barrier()  # all of what was stored before is there to be loaded
        if (before >= 0) & (count > 0):
            own = state_ptr + before.to(tl.int64) * state_stride
            state = _held(own, places, whole, TILE_COLUMNS, PARTS)
        end = _end_of_run(chunks_ptr, begin, chunks)
        # Where parts are summed, a second buffer of the sums crashes the compiler for Blackwell (sm_100).
        for chunk in tl.range(begin, end, disallow_acc_multi_buffer=PARTS > 1):
            # The compiler loads tokens a turn ahead; so what says where they lie is loaded before.
            x = _rows_of(x_ptr, x_stride, first, count, row, there, TOKENS)
            b = _rows_of(b_ptr, b_stride, first, count, column, inside[0], TOKENS)
            c = _rows_of(c_ptr, c_stride, first, count, column, inside[0], TOKENS)
            described = chunks_ptr + 4 * tl.minimum(chunk + 1, end - 1)
            next_first, next_count = tl.load(described), tl.load(described + 1)
            next_before, next_after = tl.load(described + 2), tl.load(described + 3)

            of_chunk = steps_ptr + chunk * (HEADS * 2 * TOKENS)
            steps, decayed = tl.load(of_chunk + token), tl.load(of_chunk + TOKENS + token)
            in_all = tl.load(of_chunk + 2 * TOKENS - 1)
            if (before == _NO_STATE) & (count > 0):
                state = _nothing(TILE_ROWS, TILE_COLUMNS, PARTS)
            # A part's products all come before the next part is loaded, since registers hold no two parts of
            # tokens. The last part comes behind the loop, as the only one does.
            out = tl.zeros([TOKENS, TILE_ROWS], tl.float32)
            weights = tl.zeros([TOKENS, TOKENS], tl.float32)
            grown: tl.tuple = ()
            for part in tl.static_range(LAST):
                out = tl.dot(c.to(tl.float32), state[part], out, input_precision=PRECISION)
                weights = tl.dot(c, tl.trans(b), weights, input_precision=PRECISION)
                now = _behind_chunk(state[part], x, b, steps, decayed, in_all, HELD, PRECISION)
                own = state_ptr + part * TILE_COLUMNS
                _keep(now, own, state_stride, after, count, places, whole[part])
                grown += (now,)
                next_b, next_c = b_ptr + (part + 1) * TILE_COLUMNS, c_ptr + (part + 1) * TILE_COLUMNS
                b = _rows_of(next_b, b_stride, first, count, column, inside[part + 1], TOKENS)
                c = _rows_of(next_c, c_stride, first, count, column, inside[part + 1], TOKENS)
            out = tl.dot(c.to(tl.float32), state[LAST], out, input_precision=PRECISION)
            out *= tl.exp(decayed)[:, None]

            # Within the chunk: of later tokens nothing, and D x is a token's own.
            seen = token[:, None] >= token[None, :]
            between = tl.exp(tl.where(seen, decayed[:, None] - decayed[None, :], float("-inf")))
            weights = tl.dot(c, tl.trans(b), weights, input_precision=PRECISION)
            weights = weights * between * steps[None, :]
            weights += tl.where(token[:, None] == token[None, :], skip, 0.0)
            out = tl.dot(weights, x.to(tl.float32), out, input_precision=PRECISION)
            lines = (
                first.to(tl.int64) * (HEADS * ROWS)
                + token.to(tl.int64)[:, None] * (HEADS * ROWS)
                + row[None, :]
            )
            tl.store(out_ptr + lines, out, (token < count)[:, None] & there[None, :])

            now = _behind_chunk(state[LAST], x, b, steps, decayed, in_all, HELD, PRECISION)
            own = state_ptr + LAST * TILE_COLUMNS
            _keep(now, own, state_stride, after, count, places, whole[LAST])
            grown += (now,)
            state = grown
            first, count, before, after = next_first, next_count, next_before, next_after
        begin = end
