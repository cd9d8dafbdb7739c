"""Short causal convolutions over each channel's newest inputs, which states keep from step to step."""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from quire.kernels.launch import dependent_launch
from quire.kernels.recurrence.convolution_kernels import chunk_kernel, decode_kernel
from quire.kernels.recurrence.step import CARRIED, CHUNK, NO_STATE, StateStep

DECODE_CHANNELS, DECODE_WARPS = 128, 2  # of a program: a channel's state is a few numbers
CHUNK_CHANNELS, CHUNK_WARPS = 64, 4  # 128 bytes of each token in 16 bits: whole cache lines


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
    chunk get no output: what is there is undefined. The weight, states of decodes, and in which blocks they
    are, are read before kernels ahead have ended: they must be complete when the kernel just ahead begins.
    Raise ValueError if shapes or dtypes do not fit together.
    """
    _check(x, weight, bias, state, factors)
    x, before, behind = _rows(x, factors)
    # A copy of the weight is not complete by then: decodes wait for it.
    launch = dependent_launch(x.device) if weight.is_contiguous() else {"DEPENDENT": False}
    weight = weight.contiguous()
    channels, kept = state.shape[1:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tensors, strides = (x, before, behind, weight, bias, state, out), (x.stride(0), state.stride(0))
    sizes = {"CHANNELS": channels, "INPUTS": weight.shape[1], "KEPT": kept}
    sizes |= {"KEPT_PADDED": triton.next_power_of_2(kept), "SILU": silu}
    if step.decodes:
        decode_kernel[(triton.cdiv(channels, DECODE_CHANNELS), step.decodes)](
            *tensors, step.before, step.after, *strides, **sizes, SLICE=DECODE_CHANNELS,
            INPUTS_PADDED=triton.next_power_of_2(weight.shape[1]), num_warps=DECODE_WARPS,
            **launch,
        )  # fmt: skip
    if len(step.chunks):
        chunk_kernel[(triton.cdiv(channels, CHUNK_CHANNELS), 1 + len(step.chunks))](
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
