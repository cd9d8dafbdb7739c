"""Experts of few tokens: a program has one row of an expert's weights, and one token.

Which experts are asked decides what is read, so tokens that share one have it read twice, by the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.experts.gating import gated
from quire.kernels.experts.weights import Experts
from quire.kernels.launch import dependent_launch

HELD = 8  # elements of a row that a thread reads at a time


@dataclass(frozen=True, slots=True)
class Pieces:
    """Columns of a weight that a program reads at a time: of gates and up projections, and of down."""

    up: int
    down: int


def few_experts(
    x: Tensor, index: Tensor, weights: Tensor, experts: Experts, pieces: Pieces | None = None
) -> Tensor:
    """Compute as `experts.experts` does."""
    tokens, top = index.shape
    pieces = pieces or pieces_of(experts.hidden, experts.inner)
    inner = torch.empty(tokens * top, experts.inner, dtype=x.dtype, device=x.device)
    _up_kernel[(experts.inner, tokens * top)](
        inner, x, index, experts.gate_up, experts.gate_up_bias,
        x.stride(0), experts.gate_up.stride(0), experts.gate_up.stride(1), experts.alpha, experts.limit,
        TOP=top, INNER=experts.inner, COLUMNS=experts.hidden, CHUNK=pieces.up,
        INTERLEAVED=experts.interleaved, ACTIVATION=experts.activation,
        num_warps=warps_of(pieces.up), **dependent_launch(x.device),
    )  # fmt: skip
    out = torch.empty(tokens, experts.hidden, dtype=x.dtype, device=x.device)
    _down_kernel[(experts.hidden, tokens)](
        out, inner, index, weights, experts.down, experts.down_bias,
        experts.down.stride(0), experts.down.stride(1),
        TOP=top, OUTPUTS=experts.hidden, COLUMNS=experts.inner, CHUNK=pieces.down,
        num_warps=warps_of(pieces.down), **dependent_launch(x.device),
    )  # fmt: skip
    return out


def pieces_of(hidden: int, inner: int) -> Pieces:
    """Return those of experts [2I, H] and [H, I], as measured on an H200 (loadtest/results/few-experts.json).

    Down asks for a piece of each of a token's experts at once. A last piece that ends beyond the row leaves
    threads with nothing to do.
    """
    down = 256 if inner <= 8192 else 2048
    return Pieces(min(1024, triton.next_power_of_2(hidden)), min(down, triton.next_power_of_2(inner)))


def warps_of(piece: int) -> int:
    """Return how many warps read a piece of so many columns at once."""
    return max(piece // (32 * HELD), 1)


@triton.jit
def _up_kernel(
    inner_ptr: tl.tensor,
    x_ptr: tl.tensor,
    index_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    x_stride: tl.tensor,
    expert_stride: tl.tensor,
    row_stride: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    TOP: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    expert = tl.load(index_ptr + pair).to(tl.int64)
    gate_row = row * 2 if INTERLEAVED else row
    up_row = gate_row + 1 if INTERLEAVED else row + INNER
    gate_weight = weight_ptr + expert * expert_stride + gate_row.to(tl.int64) * row_stride
    up_weight = weight_ptr + expert * expert_stride + up_row.to(tl.int64) * row_stride
    x_row = x_ptr + pair // TOP * x_stride
    gate_sums = tl.zeros([CHUNK], tl.float32)
    up_sums = tl.zeros([CHUNK], tl.float32)
    for first in range(0, COLUMNS, CHUNK):
        column = first + tl.arange(0, CHUNK)
        inside = column < COLUMNS
        gate_part = tl.load(gate_weight + column, inside, other=0.0, eviction_policy="evict_first")
        up_part = tl.load(up_weight + column, inside, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_row + column, inside, other=0.0).to(tl.float32)
        gate_sums += gate_part.to(tl.float32) * x
        up_sums += up_part.to(tl.float32) * x
    gate, up = tl.sum(gate_sums, 0), tl.sum(up_sums, 0)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + expert * (2 * INNER) + gate_row).to(tl.float32)
        up += tl.load(bias_ptr + expert * (2 * INNER) + up_row).to(tl.float32)
    result = gated(gate, up, alpha, limit, ACTIVATION)
    tl.store(inner_ptr + pair * INNER + row, result.to(inner_ptr.dtype.element_ty))


@triton.jit
def _down_kernel(
    out_ptr: tl.tensor,
    inner_ptr: tl.tensor,
    index_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    expert_stride: tl.tensor,
    row_stride: tl.tensor,
    TOP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Add up an output of a token's experts: all of their rows are asked for at once."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sums = tl.zeros([CHUNK], tl.float32)
    bias = 0.0
    for first in range(0, COLUMNS, CHUNK):
        column = first + tl.arange(0, CHUNK)
        inside = column < COLUMNS
        for place in tl.static_range(TOP):
            pair = token * TOP + place
            expert = tl.load(index_ptr + pair).to(tl.int64)
            share = tl.load(weights_ptr + pair).to(tl.float32)
            weight = weight_ptr + expert * expert_stride + row.to(tl.int64) * row_stride
            part = tl.load(weight + column, inside, other=0.0, eviction_policy="evict_first")
            values = tl.load(inner_ptr + pair * COLUMNS + column, inside, other=0.0)
            sums += part.to(tl.float32) * values.to(tl.float32) * share
    if bias_ptr is not None:
        for place in tl.static_range(TOP):
            pair = token * TOP + place
            expert = tl.load(index_ptr + pair).to(tl.int64)
            share = tl.load(weights_ptr + pair).to(tl.float32)
            bias += tl.load(bias_ptr + expert * OUTPUTS + row).to(tl.float32) * share
    tl.store(out_ptr + token * OUTPUTS + row, (tl.sum(sums, 0) + bias).to(out_ptr.dtype.element_ty))
