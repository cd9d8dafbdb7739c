"""Linear layers of one token, fused with what comes before and after them.

A single stream is bound by reading the weights, and between kernels nobody reads. So a layer is few kernels,
and each asks for its first weights before the kernel ahead of it has ended (programmatic dependent launch).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.activation import silu_mul_reference
from kernels.launch import dependent_launch
from kernels.norm import rms_norm_reference

ROWS = 2  # outputs of a program, each a row of the weight
MAX_CHUNK = 2048  # columns of the weight that a program holds at once


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """RMSNorm of x [1, K] by norm [K], times weight [N, K], plus bias [N] or None -> [1, N].

    The normalised x is not rounded to its dtype in between.
    """
    out = torch.empty(1, weight.shape[0], dtype=x.dtype, device=x.device)
    _launch(out, x, weight, bias, norm, eps, gated=False, added=False)
    return out


def norm_silu_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `norm_linear` of a fused gate and up projection, weight [2I, K], then silu(gate) · up -> [1, I]."""
    out = torch.empty(1, weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    _launch(out, x, weight, bias, norm, eps, gated=True, added=False)
    return out


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """residual [1, N] += x [1, K] times weight [N, K], plus bias [N] or None; in place."""
    _launch(residual, x, weight, bias, None, 0.0, gated=False, added=True)


def norm_linear_reference(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same as `norm_linear` in plain torch, of any number of tokens."""
    return F.linear(rms_norm_reference(x, norm, eps), weight, bias)


def norm_silu_linear_reference(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The same as `norm_silu_linear` in plain torch, of any number of tokens."""
    return silu_mul_reference(norm_linear_reference(x, norm, eps, weight, bias))


def add_linear_reference(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The same as `add_linear` in plain torch, of any number of tokens."""
    residual += F.linear(x, weight, bias)


def _launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    *,
    gated: bool,
    added: bool,
) -> None:
    if x.shape[0] != 1 or not weight.is_contiguous():
        raise ValueError(
            f"this is for one token and a contiguous weight, got {x.shape[0]} tokens and strides "
            f"{weight.stride()}"
        )
    columns = x.shape[1]
    chunk = min(MAX_CHUNK, triton.next_power_of_2(columns))
    if columns % chunk and not columns % (chunk // 2):
        chunk //= 2
    outputs = out.shape[1]
    _gemv_kernel[(triton.cdiv(outputs, ROWS),)](
        out, x, weight, bias, norm, eps,
        OUTPUTS=outputs, COLUMNS=columns, ROWS=ROWS, CHUNK=chunk, GATED=gated, ADDED=added,
        num_warps=max(chunk // 256, 1), **dependent_launch(x.device),
    )  # fmt: skip


@triton.jit
def _weights(
    weight: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Rows `row` [R] of the weight from column `first` on: [R, CHUNK], 0 outside of it."""
    column = first + tl.arange(0, CHUNK)
    pointer = weight + row[:, None].to(tl.int64) * COLUMNS + column[None, :]
    inside = (row < OUTPUTS)[:, None] & (column < COLUMNS)[None, :]
    return tl.load(pointer, inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _gemv_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """ROWS outputs of the token; with GATED, those of the gate and of the up projection."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    up_weight = weight + OUTPUTS * COLUMNS
    tile = _weights(weight, row, 0, OUTPUTS, COLUMNS, CHUNK)
    if GATED:
        up_tile = _weights(up_weight, row, 0, OUTPUTS, COLUMNS, CHUNK)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()  # from here on what earlier kernels wrote may be read, and their inputs written
    acc = tl.zeros([ROWS, CHUNK], tl.float32)
    up_acc = tl.zeros([ROWS, CHUNK], tl.float32)
    squares = tl.zeros([CHUNK], tl.float32)
    for first in range(0, COLUMNS, CHUNK):
        column = first + tl.arange(0, CHUNK)
        inside = column < COLUMNS
        values = tl.load(x + column, inside, other=0.0).to(tl.float32)
        if norm is not None:
            squares += values * values
            values *= tl.load(norm + column, inside, other=0.0).to(tl.float32)
        acc += tile.to(tl.float32) * values[None, :]
        tile = _weights(weight, row, first + CHUNK, OUTPUTS, COLUMNS, CHUNK)
        if GATED:
            up_acc += up_tile.to(tl.float32) * values[None, :]
            up_tile = _weights(up_weight, row, first + CHUNK, OUTPUTS, COLUMNS, CHUNK)
    result = tl.sum(acc, 1)
    up = tl.sum(up_acc, 1)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(squares, 0) / COLUMNS + eps)
        result *= scale
        up *= scale
    inside_out = row < OUTPUTS
    dtype = out.dtype.element_ty
    if bias is not None:
        result += tl.load(bias + row, inside_out, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + OUTPUTS + row, inside_out, other=0.0).to(tl.float32)
    result = result.to(dtype)
    if GATED:  # rounded where the unfused layers round
        gate = result.to(tl.float32)
        silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        result = (silu * up.to(dtype).to(tl.float32)).to(dtype)
    if ADDED:
        result = (tl.load(out + row, inside_out).to(tl.float32) + result.to(tl.float32)).to(dtype)
    tl.store(out + row, result, inside_out)
