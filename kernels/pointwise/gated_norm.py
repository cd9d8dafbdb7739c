"""RMSNorm with a gate, as layers that keep states have it: of whole rows, or of groups of their columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch

GateActivation = Literal["silu", "sigmoid"]
TILE = 1024  # numbers that a program has at least, if there are so many


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """An RMSNorm's weight [H] and epsilon, its groups of columns, and what is done with the gate.

    gate_first: the activation of the gate is multiplied before what is normalised (Mamba 2), else after.
    """

    weight: Tensor
    eps: float
    groups: int
    activation: GateActivation
    gate_first: bool


def gated_norm(x: Tensor, gate: Tensor, norm: GatedNorm, dtype: torch.dtype | None = None) -> Tensor:
    """Normalise x [T, H] with a gate [T, H] in fp32 -> [T, H] in `dtype`, None: x's.

    Rows may be strided; numbers of a row that are not next to each other are copied first. Raise ValueError
    if shapes do not fit together.
    """
    _check(x, gate, norm)
    x, gate = (each if each.stride(1) == 1 else each.contiguous() for each in (x, gate))
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    tokens, hidden = x.shape
    if tokens:
        columns = hidden // norm.groups
        block = triton.next_power_of_2(columns)
        rows = max(1, TILE // block)
        _gated_norm_kernel[(triton.cdiv(tokens, rows), norm.groups)](
            x, gate, norm.weight, y, tokens, x.stride(0), gate.stride(0), norm.eps, hidden, columns, block,
            rows, norm.gate_first, norm.activation == "silu", num_warps=min(max(rows * block // 256, 1), 8),
            **dependent_launch(x.device),
        )  # fmt: skip
    return y


def gated_norm_reference(
    x: Tensor, gate: Tensor, norm: GatedNorm, dtype: torch.dtype | None = None
) -> Tensor:
    """Do the same as `gated_norm` in plain torch."""
    _check(x, gate, norm)
    factor = gate.float().sigmoid()
    if norm.activation == "silu":
        factor *= gate.float()
    wide = x.float() * factor if norm.gate_first else x.float()
    grouped = wide.view(len(x), norm.groups, -1)
    scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + norm.eps)
    normed = (grouped * scale).view(x.shape) * norm.weight.float()
    return (normed if norm.gate_first else normed * factor).to(dtype or x.dtype)


def _check(x: Tensor, gate: Tensor, norm: GatedNorm) -> None:
    columns = len(norm.weight)
    if x.dim() != 2 or gate.shape != x.shape or x.shape[1] != columns or columns % norm.groups:
        raise ValueError(
            f"x {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {tuple(norm.weight.shape)} and "
            f"{norm.groups} groups do not fit: expected [T, H] twice, [H], and groups that divide H"
        )
    if not norm.weight.is_contiguous():
        raise ValueError(f"the weight's stride is {norm.weight.stride(0)}: expected it contiguous")


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("weight_ptr",))


@triton.jit
def _gated_norm_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    tokens: tl.tensor,
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SILU: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    of_group = tl.arange(0, BLOCK)
    column = tl.program_id(1) * COLUMNS + of_group
    weight = tl.load(weight_ptr + column, of_group < COLUMNS, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    inside = (token < tokens)[:, None] & (of_group < COLUMNS)[None, :]
    x = tl.load(x_ptr + token[:, None] * x_stride + column[None, :], inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token[:, None] * gate_stride + column[None, :], inside, other=0.0).to(
        tl.float32
    )
    factor = tl.sigmoid(gate)
    if SILU:
        factor *= gate
    if GATE_FIRST:
        x *= factor
    x *= tl.rsqrt(tl.sum(x * x, 1) / COLUMNS + eps)[:, None] * weight[None, :]
    if not GATE_FIRST:
        x *= factor
    tl.store(y_ptr + token[:, None] * HIDDEN + column[None, :], x.to(y_ptr.dtype.element_ty), inside)
