"""RMSNorm (Zhang & Sennrich 2019), alone and fused with the residual addition before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm's weight [H], as `rms_norm` takes it, and epsilon."""

    weight: Tensor
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise x [T, H], rows may be strided -> [T, H]: in fp32, cast, then times weight [H].

    A weight in fp32 comes before the cast, as in Gemma, where it is one more than the parameter. Numbers of
    a row of x that are not next to each other are copied first. Raise ValueError if a weight's are not, or
    those of a residual, here and in all other norms.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, y, eps)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x [T, H] to residual [T, H] in place -> (RMSNorm of their sum, residual).

    Or x [S, T, H] in fp32: parts of a sum, which is rounded to the residual's dtype before it is added.
    """
    y = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    _launch(x, residual, weight, y, eps)
    return y, residual


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Do the same as `rms_norm` in plain torch."""
    if x.dtype == torch.float32:  # nothing is rounded between the two: one call does both
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    normed = F.rms_norm(x.float(), x.shape[-1:], eps=eps)
    return (weight * (normed if weight.dtype == torch.float32 else normed.to(x.dtype))).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Do the same as `add_rms_norm` in plain torch."""
    residual += x if x.dim() == 2 else x.sum(0).to(residual.dtype)
    return rms_norm_reference(residual, weight, eps), residual


def packed_rows(x: Tensor, residual: Tensor | None, *vectors: Tensor | None) -> Tensor:
    """Return x [..., H] with numbers of a row next to each other, as kernels read them; a copy if need be.

    Raise ValueError if those of the residual [T, H], which is written in place, or of a vector [H] are not.
    """
    for name, each in (("residual", residual), *(("weight or bias", vector) for vector in vectors)):
        if each is not None and each.stride(-1) != 1:
            raise ValueError(f"the {name}'s numbers are {each.stride(-1)} apart: expected it contiguous")
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, y: Tensor, eps: float) -> None:
    tokens, hidden = y.shape
    x = packed_rows(x, residual, weight)
    if tokens == 0:
        return
    block = triton.next_power_of_2(hidden)
    parts = len(x) if x.dim() == 3 else 0  # of few tokens, whom more warps serve sooner
    _rms_norm_kernel[(tokens,)](
        x, residual, weight, y, x.stride(-2), 0 if residual is None else residual.stride(0), eps,
        x.stride(0), hidden, block, parts,
        num_warps=min(max(block // (128 if parts else 256), 1), 16), **dependent_launch(x.device),
    )  # fmt: skip


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("weight_ptr",))


@triton.jit
def add_to_residual(
    x: tl.tensor,
    row: tl.tensor,
    residual_row: tl.tensor,
    added: tl.tensor,
    inside: tl.tensor,
    part_stride: tl.tensor,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Add x, the first of a row's PARTS, the others and what is `added` to the residual; return the sum."""
    residual = tl.load(residual_row, inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(row + part * part_stride, inside, other=0.0)
    if added is not None:
        x += added
    x = x.to(residual.dtype)
    x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(residual_row, x, inside)
    return x


@triton.jit
def times_weight(x: tl.tensor, weight: tl.tensor, DTYPE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Multiply what is normalised by a norm's weight, both in fp32; with WIDE round to DTYPE only then."""
    if not WIDE:
        x = x.to(DTYPE).to(tl.float32)
    return (x * weight).to(DTYPE)


@triton.jit
def rms_normed(
    x: tl.tensor, weight: tl.tensor, eps: tl.tensor, HIDDEN: tl.constexpr, WIDE: tl.constexpr
) -> tl.tensor:
    """Normalise a row x of HIDDEN numbers and zeros, by a weight in fp32; WIDE as `times_weight` has it."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / HIDDEN + eps)
    return times_weight(wide * scale, weight, x.dtype, WIDE)


@triton.jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
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
    weight = tl.load(weight_ptr + column, inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = x_ptr + token * x_stride + column
    x = tl.load(row, inside, other=0.0)
    if residual_ptr is not None:
        residual_row = residual_ptr + token * residual_stride + column
        x = add_to_residual(x, row, residual_row, None, inside, part_stride, PARTS)
    WIDE: tl.constexpr = weight_ptr.dtype.element_ty == tl.float32
    tl.store(y_ptr + token * HIDDEN + column, rms_normed(x, weight, eps, HIDDEN, WIDE), inside)
