"""Products of a layer as `quire.kernels.plan` chooses them, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from quire.kernels.gpu import Gpu, gpu_of
from quire.kernels.linear import hopper_stream, operations
from quire.kernels.linear.hopper_stream import hopper_linear_parts
from quire.kernels.linear.linear import Linear
from quire.kernels.linear.operations import Hidden
from quire.kernels.linear.recipes import GATE, PROJECT_IN, PROJECT_OUT, Product
from quire.kernels.recipes import choose

INTERPRETER = Gpu("interpreter", (8, 0), sys.maxsize, 1)


def gpu_here(device: torch.device) -> Gpu:
    return gpu_of(device) if device.type == "cuda" else INTERPRETER


def product(x: Tensor, layer: Linear, *, fused: bool = False) -> Product:
    return Product(gpu_here(x.device), x.dtype, len(x), layer.matrix, fused=fused)


# -- of layers whose norms are kernels of their own: x is normalised -----------------------------------------


def linear(x: Tensor, layer: Linear) -> Tensor:
    return choose(PROJECT_IN, product(x, layer)).run(Hidden(x, x), x, 0.0, layer)


def silu_linear(x: Tensor, layer: Linear) -> Tensor:
    return choose(GATE, product(x, layer)).run(Hidden(x, x), x, 0.0, layer)


def linear_parts(x: Tensor, layer: Linear) -> Tensor:
    """x [T, K] -> [T, N], or fp32 [S, T, N], parts of that sum."""
    case = product(x, layer)
    tiles = case.tiling(divided=True) if hopper_stream.supports(case.gpu, case.dtype) else None
    return layer(x) if tiles is None else hopper_linear_parts(x, layer.weight, tiles)


def add_linear_norm(
    residual: Tensor, x: Tensor, layer: Linear, norm: Tensor, eps: float
) -> tuple[Tensor | None, Tensor]:
    hidden = choose(PROJECT_OUT, product(x, layer)).run(residual, x, layer, norm, eps)
    return hidden.normed, hidden.residual


def linear_reference(x: Tensor, layer: Linear) -> Tensor:
    return operations.reference_linear(Hidden(x, x), x, 0.0, layer)


def silu_linear_reference(x: Tensor, layer: Linear) -> Tensor:
    return operations.reference_gate(Hidden(x, x), x, 0.0, layer)


def add_linear_norm_reference(
    residual: Tensor, x: Tensor, layer: Linear, norm: Tensor, eps: float
) -> tuple[Tensor | None, Tensor]:
    hidden = operations.reference_add(residual, x, layer, norm, eps)
    return hidden.normed, hidden.residual


# -- of layers whose norms and sums are part of the products' kernels: x is not ------------------------------


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    layer = Linear(weight, bias)
    return choose(PROJECT_IN, product(x, layer, fused=True)).run(Hidden(x), norm, eps, layer)


def norm_silu_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    layer = Linear(weight, bias)
    return choose(GATE, product(x, layer, fused=True)).run(Hidden(x), norm, eps, layer)


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    layer = Linear(weight, bias)
    hidden = choose(PROJECT_OUT, product(x, layer, fused=True)).run(residual, x, layer, residual[0], 0.0)
    assert hidden.normed is None and hidden.residual is residual


def norm_linear_reference(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return operations.reference_linear(Hidden(x), norm, eps, Linear(weight, bias))


def norm_silu_linear_reference(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> Tensor:
    return operations.reference_gate(Hidden(x), norm, eps, Linear(weight, bias))


def add_linear_reference(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    operations.reference_add(residual, x, Linear(weight, bias), residual[0], 0.0)
