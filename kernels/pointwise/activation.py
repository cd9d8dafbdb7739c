"""Activations of MLPs: alone, or of a gate and times the up projection (Shazeer 2020)."""

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
Activation = Literal["silu", "gelu", "gelu_tanh"]  # of gates
UngatedActivation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
UNGATED: dict[UngatedActivation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": ACTIVATIONS["gelu_tanh"],
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activated(x: Tensor, activation: UngatedActivation) -> Tensor:
    """Compute an activation of x [T, I] -> [T, I]."""
    tokens, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        grid = tokens, triton.cdiv(width, BLOCK)
        _activation_kernel[grid](
            x, out, x.stride(0), width, BLOCK, activation, num_warps=8, **dependent_launch(out.device)
        )
    return out


def activated_reference(x: Tensor, activation: UngatedActivation) -> Tensor:
    """Do the same as `activated` in plain torch."""
    return UNGATED[activation](x)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Compute activation(gate) * up [T, I] of gate_up [T, 2I]; the first is rounded to the dtype."""
    tokens, width = gate_up.shape
    out = torch.empty(tokens, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        grid, launch = (tokens, triton.cdiv(width // 2, BLOCK)), dependent_launch(out.device)
        _gated_kernel[grid](
            gate_up, out, gate_up.stride(0), width // 2, BLOCK, activation, num_warps=8, **launch
        )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up [T, I] of gate_up [T, 2I], as `gated` does."""
    return gated(gate_up, "silu")


def gated_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """Do the same as `gated` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


@triton.jit
def activate(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Compute the activation of that name of x in fp32."""
    if KIND == "silu":
        result = x * tl.sigmoid(x)
    elif KIND == "gelu_tanh":  # tanh(z) is 2 sigmoid(2 z) - 1
        result = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "gelu":
        result = x * (0.5 * (1.0 + tl.erf(x * 0.7071067811865476)))
    else:
        tl.static_assert(KIND == "relu" or KIND == "relu2")  # noqa: PLR1714 (what a kernel may say)
        result = tl.where(x < 0.0, 0.0, x)
        if KIND == "relu2":
            result *= result
    return result


@triton.jit
def _activation_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + token * stride + column, inside, other=0.0)
    tl.store(out_ptr + token * WIDTH + column, activate(x.to(tl.float32), KIND).to(x.dtype), inside)


@triton.jit
def _gated_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
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
    activated = activate(gate.to(tl.float32), KIND).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + column, (activated * up).to(gate.dtype), inside)
