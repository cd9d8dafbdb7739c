"""The kernels of `recurrence.convolution`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.recurrence.step import CARRIED, NO_STATE

# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("before_ptr", "after_ptr", "state_ptr", "weight_ptr"))
_CARRIED, _NO_STATE = tl.constexpr(CARRIED), tl.constexpr(NO_STATE)


@triton.jit
def _begun(bias_ptr: tl.tensor, channel: tl.tensor, there: tl.tensor) -> tl.tensor:
    """Return what a sum begins with, of each channel."""
    if bias_ptr is not None:
        begun = tl.load(bias_ptr + channel, there, other=0.0).to(tl.float32)
    else:
        begun = tl.zeros(channel.shape, tl.float32)
    return begun


@triton.jit
def _given(x_ptr: tl.tensor, factor_ptr: tl.tensor, places: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Load inputs, times their factors."""
    x = tl.load(x_ptr + places, inside, other=0.0)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + places, inside, other=0.0)
        x = (x.to(tl.float32) * factor.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _result(
    total: tl.tensor,
    factor_ptr: tl.tensor,
    places: tl.tensor,
    inside: tl.tensor,
    SILU: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Return outputs of sums, times their factors, which are at `places` as inputs are."""
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    out = total.to(DTYPE)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + places, inside, other=0.0)
        out = (out.to(tl.float32) * factor.to(tl.float32)).to(DTYPE)
    return out


@triton.jit
def decode_kernel(
    x_ptr: tl.tensor,
    into_ptr: tl.tensor,
    onto_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    out_ptr: tl.tensor,
    before_ptr: tl.tensor,
    after_ptr: tl.tensor,
    x_stride: tl.tensor,
    state_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    INPUTS: tl.constexpr,
    KEPT: tl.constexpr,
    KEPT_PADDED: tl.constexpr,
    INPUTS_PADDED: tl.constexpr,
    SILU: tl.constexpr,
    SLICE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    channel = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    there = channel < CHANNELS
    place = tl.arange(0, KEPT_PADDED)
    token = tl.program_id(1).to(tl.int64)
    before = tl.load(before_ptr + token).to(tl.int64)
    after = tl.load(after_ptr + token).to(tl.int64)
    own = state_ptr + before * state_stride
    places = channel[:, None] * KEPT + place[None, :]
    inside = there[:, None] & (place < KEPT - 1)[None, :] & (before >= 0)
    newest = tl.load(own + places + 1, inside, other=0.0)
    of_input = tl.arange(0, INPUTS_PADDED)
    weighed = there[:, None] & (of_input < INPUTS)[None, :]
    weights = tl.load(weight_ptr + channel[:, None] * INPUTS + of_input[None, :], weighed, other=0.0)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if after < 0:  # it pads
        tl.store(out_ptr + token * CHANNELS + channel, 0.0, there)
        return
    total = _begun(bias_ptr, channel, there)
    x = _given(x_ptr, into_ptr, token * x_stride + channel, there)
    newest = tl.where((place == KEPT - 1)[None, :], x[:, None], newest)
    # In the order of the inputs, as chunks have it, so that a token's output is the same in either. The first
    # is not among the newest if a state has but those before the token, K - 1.
    for i in tl.static_range(INPUTS):
        weight = tl.sum(tl.where((of_input == i)[None, :], weights.to(tl.float32), 0.0), 1)
        if KEPT - INPUTS + i < 0:
            given = tl.load(own + channel * KEPT, there & (before >= 0), other=0.0).to(tl.float32)
        else:
            given = tl.sum(tl.where((place == KEPT - INPUTS + i)[None, :], newest.to(tl.float32), 0.0), 1)
        total = tl.fma(weight, given, total)
    out = _result(total, onto_ptr, token * x_stride + channel, there, SILU, x.dtype)
    tl.store(out_ptr + token * CHANNELS + channel, out, there)
    tl.debug_barrier()  # other threads may have read what this one writes
    tl.store(state_ptr + after * state_stride + places, newest, there[:, None] & (place < KEPT)[None, :])


@triton.jit
def _is_alone(before: tl.tensor, tokens_ahead: tl.tensor, INPUTS: tl.constexpr) -> tl.tensor:
    """Return whether a chunk needs no state: x has all inputs before it, or there are none.

    tokens_ahead: of the chunk just ahead of it, which x has just ahead if this one is carried.
    """
    return (before == _NO_STATE) | ((before == _CARRIED) & (tokens_ahead >= INPUTS - 1))


@triton.jit
def chunk_kernel(
    x_ptr: tl.tensor,
    into_ptr: tl.tensor,
    onto_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    out_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    used_ptr: tl.tensor,
    x_stride: tl.tensor,
    state_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    INPUTS: tl.constexpr,
    KEPT: tl.constexpr,
    KEPT_PADDED: tl.constexpr,
    SILU: tl.constexpr,
    SLICE: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Have a slice's first program keep states, and one more for each chunk compute what needs none.

    So chunks wait for each other only where their first tokens need inputs that x does not have just ahead.
    """
    channel = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    there = channel < CHANNELS
    begun = _begun(bias_ptr, channel, there)
    weight_ptr += channel * INPUTS
    if tl.program_id(1) == 0:
        _keep(
            x_ptr, into_ptr, onto_ptr, weight_ptr, begun, state_ptr, out_ptr, chunks_ptr, tl.load(used_ptr),
            x_stride, state_stride, channel, there, CHANNELS, INPUTS, KEPT, KEPT_PADDED, SILU, SLICE,
        )  # fmt: skip
    else:
        chunk = tl.program_id(1) - 1
        described = chunks_ptr + 4 * chunk
        first, count, before = tl.load(described), tl.load(described + 1), tl.load(described + 2)
        tokens_ahead = tl.load(described - 3, chunk > 0, other=0)
        begin = tl.where(_is_alone(before, tokens_ahead, INPUTS), 0, INPUTS - 1)
        lowest = tl.where((before == _CARRIED) & (begin == 0), 1 - INPUTS, 0)
        token = tl.arange(0, TOKENS)
        own = (token >= begin) & (token < count)
        origin = first.to(tl.int64) * x_stride
        total = tl.broadcast_to(begun[None, :], (TOKENS, SLICE))
        for i in tl.static_range(INPUTS):
            weight = tl.load(weight_ptr + i, there, other=0.0).to(tl.float32)
            at = token + (i + 1 - INPUTS)
            inside = (own & (at >= lowest))[:, None] & there[None, :]
            places = origin + at.to(tl.int64)[:, None] * x_stride + channel[None, :]
            given = _given(x_ptr, into_ptr, places, inside)
            total = tl.fma(tl.broadcast_to(weight[None, :], (TOKENS, SLICE)), given.to(tl.float32), total)
        lines = out_ptr + first.to(tl.int64) * CHANNELS + token[:, None] * CHANNELS + channel[None, :]
        places = origin + token.to(tl.int64)[:, None] * x_stride + channel[None, :]
        inside = own[:, None] & there[None, :]
        out = _result(total, onto_ptr, places, inside, SILU, out_ptr.dtype.element_ty)
        tl.store(lines, out, inside)


@triton.jit
def _keep(
    x_ptr: tl.tensor,
    into_ptr: tl.tensor,
    onto_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    begun: tl.tensor,
    state_ptr: tl.tensor,
    out_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    chunks: tl.tensor,
    x_stride: tl.tensor,
    state_stride: tl.tensor,
    channel: tl.tensor,
    there: tl.tensor,
    CHANNELS: tl.constexpr,
    INPUTS: tl.constexpr,
    KEPT: tl.constexpr,
    KEPT_PADDED: tl.constexpr,
    SILU: tl.constexpr,
    SLICE: tl.constexpr,
) -> None:
    """Go through the chunks in order: store states, and compute the first tokens of those that need one.

    `newest` has the KEPT newest inputs before a chunk, the newest last. It is up to date only where it is
    needed; if a chunk carries on from one of as many tokens, it is read from x, which has them just ahead.
    """
    place = tl.arange(0, KEPT_PADDED)
    kept = (place < KEPT)[:, None] & there[None, :]
    places = channel[None, :] * KEPT + place[:, None]
    newest = tl.zeros([KEPT_PADDED, SLICE], tl.float32)
    tokens_ahead = 0  # of the chunk just ahead
    tokens_carried = 0  # of the last one with any
    for chunk in range(chunks):
        described = chunks_ptr + 4 * chunk
        first, count = tl.load(described), tl.load(described + 1)
        before, after = tl.load(described + 2), tl.load(described + 3)
        alone = _is_alone(before, tokens_ahead, INPUTS)
        if (count > 0) & ((after >= 0) | (count < KEPT) | (alone == 0)):
            rows = first.to(tl.int64) * x_stride + channel[None, :]
            if before == _CARRIED:
                if tokens_carried >= KEPT:
                    places_ahead = rows + (place - KEPT).to(tl.int64)[:, None] * x_stride
                    newest = _given(x_ptr, into_ptr, places_ahead, kept).to(tl.float32)
            else:
                held = state_ptr + before.to(tl.int64) * state_stride + places
                newest = tl.load(held, kept & (before >= 0), other=0.0).to(tl.float32)
            if alone == 0:
                # Of the first tokens; `at` counts from the chunk's first, so that those below 0 are kept.
                own = (place < INPUTS - 1) & (place < count)
                total = tl.broadcast_to(begun[None, :], (KEPT_PADDED, SLICE))
                for i in tl.static_range(INPUTS):
                    weight = tl.load(weight_ptr + i, there, other=0.0).to(tl.float32)
                    at = place + (i + 1 - INPUTS)
                    inside = (own & (at >= 0))[:, None] & there[None, :]
                    given = _given(x_ptr, into_ptr, rows + at.to(tl.int64)[:, None] * x_stride, inside)
                    given = tl.where((at < 0)[:, None], _moved(newest, at + KEPT), given.to(tl.float32))
                    wide = tl.broadcast_to(weight[None, :], (KEPT_PADDED, SLICE))
                    total = tl.fma(wide, given, total)
                lines = out_ptr + first.to(tl.int64) * CHANNELS + place[:, None] * CHANNELS + channel[None, :]
                inside = own[:, None] & there[None, :]
                own_places = rows + place.to(tl.int64)[:, None] * x_stride
                out = _result(total, onto_ptr, own_places, inside, SILU, out_ptr.dtype.element_ty)
                tl.store(lines, out, inside)
            at = place + count - KEPT
            newer = rows + at.to(tl.int64)[:, None] * x_stride
            given = _given(x_ptr, into_ptr, newer, kept & (at >= 0)[:, None])
            newest = tl.where((at < 0)[:, None], _moved(newest, at + KEPT), given.to(tl.float32))
            if after >= 0:
                tl.debug_barrier()  # other threads may have read what this one writes
                held = state_ptr + after.to(tl.int64) * state_stride + places
                tl.store(held, newest.to(state_ptr.dtype.element_ty), kept)
                tl.debug_barrier()  # and are to read it if a chunk goes on from it
        tokens_ahead = count
        tokens_carried = tl.where(count > 0, count, tokens_carried)


@triton.jit
def _moved(tile: tl.tensor, origin: tl.tensor) -> tl.tensor:
    """Return a tile [P, C] whose row i is the given one's row origin[i], zeros if there is none."""
    taken = origin[:, None] == tl.arange(0, tile.shape[0])[None, :]
    return tl.sum(tl.where(taken[:, :, None], tile[None, :, :], 0.0), 1)
