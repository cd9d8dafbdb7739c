"""Kernels of Mamba's scan: of one token each of sequences that decode, and of prompts' chunks in order."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.recurrence.step import CARRIED
from quire.kernels.recurrence.time_steps import softplus

# Decodes: a program has so many numbers of states in registers, 8 a thread.
DECODE_NUMBERS, DECODE_WARPS = 1024, 4

# Chunks: each lane of a program's warps has a channel, and the warps share the columns of its state. They
# take a few tokens together, while those behind them come from memory: so many numbers, 64 a thread.
SLICE, WARPS = 32, 4
NUMBERS, MOST_TOGETHER = 8192, 16
_CARRIED = tl.constexpr(CARRIED)
_LOG2_OF_E = tl.constexpr(1.4426950408889634)


def decode_tile(columns: int) -> dict[str, int]:
    """Return how much of a token's states a program of `decode_kernel` has, padded."""
    padded = triton.next_power_of_2(columns)
    return {"SLICE": max(DECODE_NUMBERS // padded, 1), "COLUMNS_PADDED": padded}


def chunk_tile(columns: int) -> dict[str, int]:
    """Return of how many tokens a program of `chunk_kernel` has its slice of the states, padded."""
    padded = triton.next_power_of_2(columns)
    return {
        "SLICE": SLICE,
        "COLUMNS_PADDED": padded,
        "TOGETHER": min(NUMBERS // (SLICE * padded), MOST_TOGETHER),
    }


@triton.jit
def _time_steps(
    dt: tl.tensor, bias_ptr: tl.tensor, channel: tl.tensor, there: tl.tensor, SOFTPLUS: tl.constexpr
) -> tl.tensor:
    dt = dt.to(tl.float32)
    if bias_ptr is not None:
        dt += tl.load(bias_ptr + channel, there, other=0.0).to(tl.float32)
    if SOFTPLUS:
        dt = softplus(dt)
    return dt


@triton.jit
def _finished(
    seen: tl.tensor,
    x: tl.tensor,
    z: tl.tensor,
    d_ptr: tl.tensor,
    channel: tl.tensor,
    there: tl.tensor,
    GATED: tl.constexpr,
) -> tl.tensor:
    """Return the outputs of tokens, of what they see in their states."""
    if d_ptr is not None:
        seen = tl.load(d_ptr + channel, there, other=0.0).to(tl.float32) * x + seen
    if GATED:
        gate = z.to(tl.float32)
        seen = seen * (gate / (1.0 + tl.exp(-gate)))
    return seen


@triton.jit
def decode_kernel(
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    d_ptr: tl.tensor,
    z_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    out_ptr: tl.tensor,
    before_ptr: tl.tensor,
    after_ptr: tl.tensor,
    x_stride: tl.tensor,
    dt_stride: tl.tensor,
    b_stride: tl.tensor,
    c_stride: tl.tensor,
    z_stride: tl.tensor,
    state_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    SLICE: tl.constexpr,
    COLUMNS_PADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    channel = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    column = tl.arange(0, COLUMNS_PADDED)
    there, inside = channel < CHANNELS, column < COLUMNS
    token = tl.program_id(1).to(tl.int64)
    before = tl.load(before_ptr + token).to(tl.int64)
    after = tl.load(after_ptr + token).to(tl.int64)
    if after < 0:  # it pads
        tl.store(out_ptr + token * CHANNELS + channel, 0.0, there)
        return
    places = channel[:, None] * COLUMNS + column[None, :]
    whole = there[:, None] & inside[None, :]
    state = tl.load(state_ptr + before * state_stride + places, whole & (before >= 0), other=0.0)
    rates = tl.load(a_ptr + places, whole, other=0.0).to(tl.float32) * _LOG2_OF_E
    x = tl.load(x_ptr + token * x_stride + channel, there, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + token * dt_stride + channel, there, other=0.0)
    b = tl.load(b_ptr + token * b_stride + column, inside, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + token * c_stride + column, inside, other=0.0).to(tl.float32)
    z = x
    if z_ptr is not None:
        z = tl.load(z_ptr + token * z_stride + channel, there, other=0.0)
    steps = _time_steps(dt, bias_ptr, channel, there, SOFTPLUS)
    state = tl.fma(tl.exp2(steps[:, None] * rates), state, (steps * x)[:, None] * b[None, :])
    tl.store(state_ptr + after * state_stride + places, state, whole)
    seen = tl.sum(state * c[None, :], 1)
    out = _finished(seen, x, z, d_ptr, channel, there, z_ptr is not None)
    tl.store(out_ptr + token * CHANNELS + channel, out.to(out_ptr.dtype.element_ty), there)


@triton.jit
def _rows_of(
    ptr: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """Return columns of `count` tokens, zeros behind them."""
    token = tl.arange(0, TOKENS)
    places = ptr + first.to(tl.int64) * stride + token.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(places, (token < count)[:, None] & inside[None, :], other=0.0)


@triton.jit
def _composed(decay: tl.tensor, added: tl.tensor, next_decay: tl.tensor, next_added: tl.tensor) -> tl.tensor:
    """Return what two tokens do to a state, one after the other."""
    return decay * next_decay, tl.fma(next_decay, added, next_added)


@triton.jit
def chunk_kernel(
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    d_ptr: tl.tensor,
    z_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    out_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    used_ptr: tl.tensor,
    x_stride: tl.tensor,
    dt_stride: tl.tensor,
    b_stride: tl.tensor,
    c_stride: tl.tensor,
    z_stride: tl.tensor,
    state_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    SLICE: tl.constexpr,
    COLUMNS_PADDED: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    channel = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    column = tl.arange(0, COLUMNS_PADDED)
    token = tl.arange(0, TOGETHER)
    there, inside = channel < CHANNELS, column < COLUMNS
    # Channels come last, so that lanes have them: then each has all its tokens, and goes through them alone.
    places = channel[None, :] * COLUMNS + column[:, None]
    whole = inside[:, None] & there[None, :]
    rates = tl.load(a_ptr + places, whole, other=0.0).to(tl.float32) * _LOG2_OF_E
    last = (token == TOGETHER - 1)[:, None, None]
    states = tl.zeros([TOGETHER, COLUMNS_PADDED, SLICE], tl.float32)  # behind each token; the last is needed

    chunks = tl.load(used_ptr)
    first, count = tl.load(chunks_ptr), tl.load(chunks_ptr + 1)
    x = _rows_of(x_ptr, x_stride, first, count, channel, there, TOGETHER)
    dt = _rows_of(dt_ptr, dt_stride, first, count, channel, there, TOGETHER)
    b = _rows_of(b_ptr, b_stride, first, count, column, inside, TOGETHER)
    c = _rows_of(c_ptr, c_stride, first, count, column, inside, TOGETHER)
    z = x
    if z_ptr is not None:
        z = _rows_of(z_ptr, z_stride, first, count, channel, there, TOGETHER)
    for chunk in range(chunks):
        before, after = tl.load(chunks_ptr + 4 * chunk + 2), tl.load(chunks_ptr + 4 * chunk + 3)
        described = chunks_ptr + 4 * tl.minimum(chunk + 1, chunks - 1)
        next_first, next_count = tl.load(described), tl.load(described + 1)
        if (count > 0) & (before != _CARRIED):
            held = state_ptr + before.to(tl.int64) * state_stride + places
            state = tl.load(held, whole & (before >= 0), other=0.0)
            states = tl.broadcast_to(state[None, :, :], states.shape)
        # One that pads takes a turn, too: it changes nothing, and those behind it are on their way.
        for begin in range(0, tl.maximum(count, 1), TOGETHER):
            end = begin + TOGETHER
            coming = tl.where(end < count, first + end, next_first)
            left = tl.where(end < count, count - end, next_count)
            next_x = _rows_of(x_ptr, x_stride, coming, left, channel, there, TOGETHER)
            next_dt = _rows_of(dt_ptr, dt_stride, coming, left, channel, there, TOGETHER)
            next_b = _rows_of(b_ptr, b_stride, coming, left, column, inside, TOGETHER)
            next_c = _rows_of(c_ptr, c_stride, coming, left, column, inside, TOGETHER)
            next_z = next_x
            if z_ptr is not None:
                next_z = _rows_of(z_ptr, z_stride, coming, left, channel, there, TOGETHER)

            own = (token < count - begin)[:, None] & there[None, :]
            given = x.to(tl.float32)
            steps = _time_steps(dt, bias_ptr, channel[None, :], there[None, :], SOFTPLUS)
            steps = tl.where(own, steps, 0.0)  # behind the tokens nothing decays, and nothing is added
            decay = tl.exp2(steps[:, None, :] * rates[None, :, :])
            added = (steps * given)[:, None, :] * b.to(tl.float32)[:, :, None]
            state = tl.sum(tl.where(last, states, 0.0), 0)
            begun = tl.fma(decay, tl.broadcast_to(state[None, :, :], decay.shape), added)
            added = tl.where((token == 0)[:, None, None], begun, added)
            _, states = tl.associative_scan((decay, added), 0, _composed)
            seen = tl.sum(states * c.to(tl.float32)[:, :, None], 1)
            out = _finished(seen, given, z, d_ptr, channel[None, :], there[None, :], z_ptr is not None)
            lines = out_ptr + (first + begin).to(tl.int64) * CHANNELS
            lines += token[:, None] * CHANNELS + channel[None, :]
            tl.store(lines, out.to(out_ptr.dtype.element_ty), own)
            x, dt, b, c, z = next_x, next_dt, next_b, next_c, next_z
        if (count > 0) & (after >= 0):
            state = tl.sum(tl.where(last, states, 0.0), 0)
            tl.debug_barrier()  # other threads may have read what this one writes
            tl.store(state_ptr + after.to(tl.int64) * state_stride + places, state, whole)
            tl.debug_barrier()  # and are to read it if a chunk goes on from it
        first, count = next_first, next_count
