"""Activations of gated MLPs (Shazeer 2020): SiLU or GELU of the gate, times the up projection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch

BLOCK = 1024
Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Compute activation(gate) * up [T, I] of gate_up [T, 2I]; the first is rounded to the dtype."""
    tokens, width = gate_up.shape
    out = torch.empty(tokens, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        grid, launch = (tokens, triton.cdiv(width // 2, BLOCK)), dependent_launch(out.device)
        given = gate_up, out, gate_up.stride(0), width // 2, BLOCK
        if activation == "silu":
            _silu_mul_kernel[grid](*given, num_warps=8, **launch)
        else:
            _gelu_mul_kernel[grid](*given, activation == "gelu_tanh", num_warps=8, **launch)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up [T, I] of gate_up [T, 2I], as `gated` does."""
    return gated(gate_up, "silu")


def gated_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """Do the same as `gated` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
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
    row = gate_up_ptr + token * stride + column
    gate = tl.load(row, inside, other=0.0)
    up = tl.load(row + WIDTH, inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + column, (silu * up).to(gate.dtype), inside)


@triton.jit
def _gelu_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TANH: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    row = gate_up_ptr + token * stride + column
    gate = tl.load(row, inside, other=0.0)
    up = tl.load(row + WIDTH, inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    if TANH:  # tanh(z) is 2 sigmoid(2 z) - 1
        part = tl.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide * wide * wide))
    else:
        part = 0.5 * (1.0 + tl.erf(wide * 0.7071067811865476))
    gelu = (wide * part).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + column, (gelu * up).to(gate.dtype), inside)
