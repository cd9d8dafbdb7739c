"""Linear layers as a model calls them: by the kernels that are quickest for so many tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.linear.gemv import linear_of_one
from quire.kernels.linear.hopper_matmul import (
    hopper_matmul,
    hopper_matmul_add,
    hopper_matmul_silu,
    suits_hopper_matmul,
)
from quire.kernels.linear.hopper_stream import (
    Tiling,
    hopper_linear,
    hopper_linear_parts,
    hopper_silu_linear,
    suits_hopper_linear,
    tiling,
)
from quire.kernels.pointwise.activation import silu_mul, silu_mul_reference
from quire.kernels.pointwise.norm import add_rms_norm, add_rms_norm_reference, rms_norm

MOST_TOKENS_OF_LT = 384  # beyond, cuBLASLt is no better at long sums, and up to 15 % worse


class Linear:
    """weight [out, in], bias [out] or None: x [T, in] -> [T, out], by torch."""

    __slots__ = ("_few_added", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self._few_added = bias
        outputs, inputs = weight.shape
        if bias is None and weight.is_cuda and inputs > 2 * outputs:
            # torch asks cuBLASLt instead of cuBLAS when it adds a bias, and that divides long sums of few
            # tokens better: 45 against 53 µs at 128 tokens, 14336 -> 4096 on an H100.
            self._few_added = torch.zeros(outputs, dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self._few_added if len(x) <= MOST_TOKENS_OF_LT else self.bias)


def linear(x: Tensor, layer: Linear) -> Tensor:
    """x [T, K] -> [T, N]."""
    if (tiles := _tiles(x, layer.weight)) is not None:
        return hopper_linear(x, layer.weight, layer.bias, tiles)
    return hopper_matmul(x, layer.weight) if _many(x, layer, spared=0) else layer(x)


def silu_linear(x: Tensor, layer: Linear) -> Tensor:
    """x [T, K] by a gate and an up projection, fused, to [T, 2I], then silu(gate) · up -> [T, I]."""
    if layer.bias is None and (tiles := _tiles(x, layer.weight, gated=True)) is not None:
        return hopper_silu_linear(x, layer.weight, tiles)
    if _many(x, layer, spared=2):  # gate and up are written by cuBLAS, and read by `silu_mul`
        return hopper_matmul_silu(x, layer.weight)
    return silu_mul(layer(x))


def linear_parts(x: Tensor, layer: Linear) -> Tensor:
    """x [T, K] -> [T, N], or fp32 [S, T, N], parts of that sum: as `add_rms_norm` takes it."""
    tiles = _tiles(x, layer.weight, divided=True) if layer.bias is None else None
    return layer(x) if tiles is None else hopper_linear_parts(x, layer.weight, tiles)


def add_linear_norm(
    residual: Tensor, x: Tensor, layer: Linear, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """residual [T, N], x [T, K] -> (RMSNorm of residual plus the layer's result, residual).

    The residual is added to in place.
    """
    # What cuBLAS gives is written, and read by `add_rms_norm`; the sum has to be read by a norm of its own.
    if residual.is_contiguous() and residual.dtype == x.dtype and _many(x, layer, spared=1):
        hopper_matmul_add(residual, x, layer.weight)
        return rms_norm(residual, norm, eps), residual
    return add_rms_norm(linear_parts(x, layer), residual, norm, eps)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times weight [N, K] -> [T, N], for an N as wide as a vocabulary."""
    if len(x) != 1:
        tiles = _tiles(x, weight)
        return F.linear(x, weight) if tiles is None else hopper_linear(x, weight, None, tiles)
    out = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.device)
    linear_of_one(out, x, weight, None, None, 0.0, gated=False, added=False)
    return out


def linear_reference(x: Tensor, layer: Linear) -> Tensor:
    """The same as `linear` in plain torch."""
    return layer(x)


def add_linear_norm_reference(
    residual: Tensor, x: Tensor, layer: Linear, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The same as `add_linear_norm` in plain torch."""
    return add_rms_norm_reference(layer(x), residual, norm, eps)


def silu_linear_reference(x: Tensor, layer: Linear) -> Tensor:
    """The same as `silu_linear` in plain torch."""
    return silu_mul_reference(layer(x))


def _tiles(x: Tensor, weight: Tensor, *, gated: bool = False, divided: bool = False) -> Tiling | None:
    if not suits_hopper_linear(x, weight):
        return None
    return tiling(len(x), *weight.shape, gated=gated, divided=divided)


def _many(x: Tensor, layer: Linear, *, spared: int) -> bool:
    return layer.bias is None and suits_hopper_matmul(x, layer.weight, spared=spared)
