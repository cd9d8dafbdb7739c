"""Short causal convolutions over each channel's newest inputs, which states keep from step to step."""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch
from quire.kernels.recurrence.step import CARRIED, CHUNK, NO_STATE, StateStep

DECODE_CHANNELS, DECODE_WARPS = 128, 2  # of a program: a channel's state is a few numbers
CHUNK_CHANNELS, CHUNK_WARPS = 64, 4  # 128 bytes of each token in 16 bits: whole cache lines
_CARRIED, _NO_STATE = tl.constexpr(CARRIED), tl.constexpr(NO_STATE)


Factors: TypeAlias = tuple[Tensor, Tensor]


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    state: Tensor,
    step: StateStep,
    factors: Factors | None = None,
) -> Tensor:
    """Convolve a step's tokens x [T, C] -> [T, C], and leave the newest inputs where the step says.

    A token's output is the sum of weight [C, K] times its sequence's newest K inputs, the last one its own,
    plus bias [C], all in fp32; if `silu`, SiLU of that. state [blocks, C, S] has the newest inputs, at least
    K - 1 of them, the newest last, zeros before a sequence's first. factors: what inputs are multiplied by
    first, and outputs last, [T, C] each; products are rounded to x's dtype (LFM2). Tokens of no decode and no
    chunk get no output: what is there is undefined. Raise ValueError if shapes or dtypes do not fit together.
    """
    _check(x, weight, bias, state, factors)
    x, before, behind = _rows(x, factors)
    weight = weight.contiguous()
    channels, kept = state.shape[1:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tensors, strides = (x, before, behind, weight, bias, state, out), (x.stride(0), state.stride(0))
    sizes = {"CHANNELS": channels, "INPUTS": weight.shape[1], "KEPT": kept}
    sizes |= {"KEPT_PADDED": triton.next_power_of_2(kept), "SILU": silu}
    if step.decodes:
        _decode_kernel[(triton.cdiv(channels, DECODE_CHANNELS), step.decodes)](
            *tensors, step.before, step.after, *strides, **sizes, SLICE=DECODE_CHANNELS,
            num_warps=DECODE_WARPS, **dependent_launch(x.device),
        )  # fmt: skip
    if len(step.chunks):
        _chunk_kernel[(triton.cdiv(channels, CHUNK_CHANNELS), 1 + len(step.chunks))](
            *tensors, step.chunks, step.last_used, *strides, **sizes, SLICE=CHUNK_CHANNELS, TOKENS=CHUNK,
            num_warps=CHUNK_WARPS,
        )  # fmt: skip
    return out


def convolve_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    state: Tensor,
    step: StateStep,
    factors: Factors | None = None,
) -> Tensor:
    """Do the same as `convolve` in plain torch, one token after the other; what is undefined there is 0."""
    _check(x, weight, bias, state, factors)
    if factors is not None:
        x = x * factors[0]
    out, inputs = torch.zeros(x.shape, dtype=x.dtype, device=x.device), weight.shape[1]
    newest = nothing = torch.zeros_like(state[:1]).sum(0)  # also if there are no blocks
    for first, tokens, before, after in step.in_order():
        if before != CARRIED:
            newest = nothing if before == NO_STATE else state[before]
        for token in range(first, first + tokens):
            seen = torch.cat([newest, x[token, :, None]], 1)
            result = (weight.float() * seen[:, -inputs:].float()).sum(1)
            result = result if bias is None else result + bias.float()
            out[token] = (F.silu(result) if silu else result).to(x.dtype)
            newest = seen[:, 1:]
        if after >= 0:
            state[after] = newest
    return out if factors is None else out * factors[1]


def _rows(x: Tensor, factors: Factors | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return inputs and factors with tokens as far apart in all, as they are in one product's parts."""
    if factors is None:
        return x if x.stride(1) == 1 else x.contiguous(), None, None
    before, behind = factors
    if not x.stride() == before.stride() == behind.stride() or x.stride(1) != 1:
        return x.contiguous(), before.contiguous(), behind.contiguous()
    return x, before, behind


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, factors: Factors | None) -> None:
    channels, inputs = weight.shape
    if factors is not None and {(each.shape, each.dtype) for each in factors} != {(x.shape, x.dtype)}:
        shapes = [(tuple(each.shape), each.dtype) for each in factors]
        raise ValueError(f"factors {shapes}: expected two as x is, {tuple(x.shape)} in {x.dtype}")
    if x.shape[1:] != (channels,) or state.shape[1:2] != (channels,) or state.shape[2] < max(inputs - 1, 1):
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and states {tuple(state.shape)} do not fit: "
            "expected [T, C], [C, K] and [blocks, C, S], where S is at least 1 and K - 1"
        )
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"a bias {tuple(bias.shape)}: expected [{channels}], one number of each channel")
    if x.dtype != state.dtype:
        raise ValueError(f"inputs are in {x.dtype} and kept in {state.dtype}: expected one dtype")
    if len(state) and not state[0].is_contiguous():
        raise ValueError(f"a block's states have strides {state.stride()[1:]}: expected them contiguous")


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
def _decode_kernel(
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
    SILU: tl.constexpr,
    SLICE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    channel = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    there = channel < CHANNELS
    total = _begun(bias_ptr, channel, there)
    place = tl.arange(0, KEPT_PADDED)
    token = tl.program_id(1).to(tl.int64)
    before = tl.load(before_ptr + token).to(tl.int64)
    after = tl.load(after_ptr + token).to(tl.int64)
    if after < 0:  # it pads
        tl.store(out_ptr + token * CHANNELS + channel, 0.0, there)
        return
    x = _given(x_ptr, into_ptr, token * x_stride + channel, there)
    own = state_ptr + before * state_stride
    places = channel[:, None] * KEPT + place[None, :]
    inside = there[:, None] & (place < KEPT - 1)[None, :] & (before >= 0)
    newest = tl.load(own + places + 1, inside, other=0.0)
    newest = tl.where((place == KEPT - 1)[None, :], x[:, None], newest)
    # In the order of the inputs, as chunks have it, so that a token's output is the same in either. The first
    # is not among the newest if a state has but those before the token, K - 1.
    for i in tl.static_range(INPUTS):
        weight = tl.load(weight_ptr + channel * INPUTS + i, there, other=0.0).to(tl.float32)
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
def _chunk_kernel(
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
