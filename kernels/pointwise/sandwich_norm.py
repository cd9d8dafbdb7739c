"""RMSNorms around a sum (Ding et al. 2021): of what a branch adds to the residual, and of that sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch
from quire.kernels.pointwise.norm import Norm, packed_rows, rms_norm_reference, rms_normed


def sandwich_norm(x: Tensor, residual: Tensor, inner: Norm | None, outer: Norm | None) -> Tensor:
    """Add the `inner` norm of x [T, H] to residual [T, H] in place; return the `outer` norm of the sum.

    Without the one x is added as it is, without the other the residual itself is returned. Or x [S, T, H] in
    fp32: parts of a sum, which is rounded to the residual's dtype first. What is rounded is what
    `norm.rms_norm`, an addition and `norm.rms_norm` round. Numbers of a row of x that lie apart are copied
    first; raise ValueError if others do.
    """
    tokens, hidden = residual.shape
    x = packed_rows(x, residual, *(None if norm is None else norm.weight for norm in (inner, outer)))
    y = None if outer is None else residual.new_empty(residual.shape)
    if tokens:
        block = triton.next_power_of_2(hidden)
        parts = len(x) if x.dim() == 3 else 0  # of few tokens, whom more warps serve sooner
        # A product in 16 bits that is then added is to be rounded: ptxas would make one instruction of both.
        rounds = inner is not None and inner.weight.dtype != torch.float32
        _sandwich_kernel[(tokens,)](
            x, residual, None if inner is None else inner.weight, None if outer is None else outer.weight, y,
            x.stride(-2), residual.stride(0), x.stride(0), 0.0 if inner is None else inner.eps,
            0.0 if outer is None else outer.eps, hidden, block, parts,
            num_warps=min(max(block // (128 if parts else 256), 1), 16), enable_fp_fusion=not rounds,
            **dependent_launch(x.device),
        )  # fmt: skip
    return residual if y is None else y


def sandwich_norm_reference(x: Tensor, residual: Tensor, inner: Norm | None, outer: Norm | None) -> Tensor:
    """Do the same as `sandwich_norm` in plain torch."""
    if x.dim() == 3:
        x = x.sum(0).to(residual.dtype)
    residual += x if inner is None else rms_norm_reference(x, inner.weight, inner.eps)
    return residual if outer is None else rms_norm_reference(residual, outer.weight, outer.eps)


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("inner_ptr", "outer_ptr"))


@triton.jit
def _sandwich_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    inner_ptr: tl.tensor,
    outer_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    part_stride: tl.tensor,
    inner_eps: tl.tensor,
    outer_eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    if inner_ptr is not None:
        inner = tl.load(inner_ptr + column, inside, other=0.0).to(tl.float32)
    if outer_ptr is not None:
        outer = tl.load(outer_ptr + column, inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = x_ptr + token * x_stride + column
    residual_row = residual_ptr + token * residual_stride + column
    x = tl.load(row, inside, other=0.0)
    residual = tl.load(residual_row, inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(row + part * part_stride, inside, other=0.0)
    x = x.to(residual.dtype)
    if inner_ptr is not None:
        INNER_WIDE: tl.constexpr = inner_ptr.dtype.element_ty == tl.float32
        x = rms_normed(x, inner, inner_eps, HIDDEN, INNER_WIDE)
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
    tl.store(residual_row, total, inside)
    if outer_ptr is not None:
        OUTER_WIDE: tl.constexpr = outer_ptr.dtype.element_ty == tl.float32
        result = rms_normed(total, outer, outer_eps, HIDDEN, OUTER_WIDE)
        tl.store(y_ptr + token * HIDDEN + column, result, inside)
