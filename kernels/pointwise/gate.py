"""Gates of what attention gives: each number times the sigmoid of another (Qiu et al. 2025)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch

BLOCK, WARPS = 1024, 4


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return x · sigmoid(gate) [T, N] in x's dtype; the sigmoid is rounded to the gate's dtype first.

    Rows of both [T, N] may be strided. Raise ValueError if shapes do not fit together.
    """
    _check(x, gate)
    x, gate = (each if each.stride(1) == 1 else each.contiguous() for each in (x, gate))
    tokens, width = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        _gate_kernel[(tokens, triton.cdiv(width, BLOCK))](
            x, gate, y, x.stride(0), gate.stride(0), width, BLOCK, num_warps=WARPS,
            **dependent_launch(x.device),
        )  # fmt: skip
    return y


def sigmoid_gate_reference(x: Tensor, gate: Tensor) -> Tensor:
    """Do the same as `sigmoid_gate` in plain torch."""
    _check(x, gate)
    return (x * gate.sigmoid()).to(x.dtype)


def _check(x: Tensor, gate: Tensor) -> None:
    if x.dim() != 2 or gate.shape != x.shape:
        raise ValueError(
            f"x {tuple(x.shape)} and gate {tuple(gate.shape)} do not fit: expected [T, N] of both"
        )


@triton.jit
def _gate_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + token * x_stride + column, inside, other=0.0)
    gate = tl.load(gate_ptr + token * gate_stride + column, inside, other=0.0)
    factor = tl.sigmoid(gate.to(tl.float32)).to(gate.dtype).to(tl.float32)
    tl.store(y_ptr + token * WIDTH + column, (x.to(tl.float32) * factor).to(x.dtype), inside)
