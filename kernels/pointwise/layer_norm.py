"""Layer norm (Ba, Kiros & Hinton 2016), alone and fused with the residual addition before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch
from quire.kernels.pointwise.norm import add_to_residual, packed_rows


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise x [T, H], rows may be strided, in fp32 -> [T, H], times weight and plus bias [H] if any."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, None, weight, bias, y, eps)
    return y


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    added: Tensor | None = None,
) -> Tensor:
    """Add x [T, H] to residual [T, H] in place; return the layer norm of the sum.

    Or x [S, T, H] in fp32: parts of a sum, which with what is `added` [H] to it is rounded to the residual's
    dtype before it is added to that.
    """
    y = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    _launch(x, residual, added, weight, bias, y, eps)
    return y


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Do the same as `layer_norm` in plain torch."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    added: Tensor | None = None,
) -> Tensor:
    """Do the same as `add_layer_norm` in plain torch."""
    if x.dim() == 3:
        x = x.sum(0)
        x = (x if added is None else x + added).to(residual.dtype)
    residual += x
    return layer_norm_reference(residual, weight, bias, eps)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    added: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    eps: float,
) -> None:
    tokens, hidden = y.shape
    x = packed_rows(x, residual, added, weight, bias)
    if tokens == 0:
        return
    block = triton.next_power_of_2(hidden)
    parts = len(x) if x.dim() == 3 else 0  # of few tokens, whom more warps serve sooner
    _layer_norm_kernel[(tokens,)](
        x, residual, added if parts else None, weight, bias, y, x.stride(-2),
        0 if residual is None else residual.stride(0), eps, x.stride(0), hidden, block, parts,
        num_warps=min(max(block // (128 if parts else 256), 1), 16), **dependent_launch(x.device),
    )  # fmt: skip


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("added_ptr", "weight_ptr", "bias_ptr"))


@triton.jit
def _layer_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    added_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    part_stride: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    added = None
    if added_ptr is not None:
        added = tl.load(added_ptr + column, inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = x_ptr + token * x_stride + column
    x = tl.load(row, inside, other=0.0)
    if residual_ptr is not None:
        residual_row = residual_ptr + token * residual_stride + column
        x = add_to_residual(x, row, residual_row, added, inside, part_stride, PARTS)
    wide = x.to(tl.float32)
    apart = tl.where(inside, wide - tl.sum(wide) / HIDDEN, 0.0)
    result = apart * tl.rsqrt(tl.sum(apart * apart) / HIDDEN + eps)
    if weight_ptr is not None:
        result *= weight
    if bias_ptr is not None:
        result += bias
    tl.store(y_ptr + token * HIDDEN + column, result.to(x.dtype), inside)
