"""The products of a decoder layer, each with the norm before it or the sum after it, by every kernel.

There are three operations, and `kernels.plan` picks a function for each. Project in: RMSNorm and a product,
(hidden, norm [K], eps, layer) -> [T, N]. Gate: the same by a fused gate and up projection, a weight [2I, K],
then silu(gate) · up -> [T, I]. Project out: (residual [T, N], x [T, K], layer, norm [N], eps) -> hidden: the
product is added to the residual in place, and some have the norm that follows at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire.kernels.attention.splits import SplitPartials
from quire.kernels.linear.gemv import linear_of_one
from quire.kernels.linear.hopper_matmul import hopper_matmul, hopper_matmul_add, hopper_matmul_silu
from quire.kernels.linear.hopper_stream import (
    Tiling,
    hopper_gated_linear,
    hopper_linear,
    hopper_linear_parts,
    suits_hopper_linear,
    tiling,
)
from quire.kernels.linear.linear import Linear
from quire.kernels.linear.split_output import add_split_output
from quire.kernels.pointwise.activation import gated_reference, silu_mul
from quire.kernels.pointwise.layer_norm import add_layer_norm, add_layer_norm_reference, layer_norm
from quire.kernels.pointwise.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from quire.kernels.quantised.linear import QuantisedLinear
from quire.kernels.quantised.weight import QuantisedWeight


class Hidden(NamedTuple):
    """Hidden states between operations: the residual [T, H], and its RMSNorm if that is at hand."""

    residual: Tensor
    normed: Tensor | None = None


AnyLinear: TypeAlias = Linear | QuantisedLinear
# Of a layer's kind a function takes what its recipe does: `Linear`, or `quantised.linear.QuantisedLinear`.
ProjectIn: TypeAlias = Callable[[Hidden, Tensor, float, Any], Tensor]
ProjectOut: TypeAlias = Callable[[Tensor, "Tensor | SplitPartials", Any, Tensor, float], Hidden]
AddLayerNorm: TypeAlias = Callable[[Tensor, Tensor, Any, "Tensor | None", "Tensor | None", float], Tensor]
FusedProduct: TypeAlias = Callable[..., None]  # `linear_of_few` or `linear_of_one`


# -- by one kernel of few tokens, which reads the residual and writes it -----------------------------------
# The normalised numbers are not rounded in between, or only before they are scaled. So few tokens are bound
# by reading the weights, and between kernels nobody reads: so a layer is few kernels.


def fused_linear(hidden: Hidden, norm: Tensor, eps: float, layer: AnyLinear, by: FusedProduct) -> Tensor:
    x, weight = hidden.residual, layer.weight
    out = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.device)
    by(out, *_normed_within(hidden, norm, eps, layer), gated=False, added=False)
    return out


def fused_gate(hidden: Hidden, norm: Tensor, eps: float, layer: AnyLinear, by: FusedProduct) -> Tensor:
    x, weight = hidden.residual, layer.weight
    out = torch.empty(len(x), weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    by(out, *_normed_within(hidden, norm, eps, layer), gated=True, added=False)
    return out


def fused_add(
    residual: Tensor, x: Tensor | SplitPartials, layer: AnyLinear, norm: Tensor, eps: float, by: FusedProduct
) -> Hidden:
    by(residual, whole(x), layer.weight, layer.bias, None, 0.0, gated=False, added=True)
    return Hidden(residual)


def merging_add(
    residual: Tensor, x: Tensor | SplitPartials, layer: Linear, norm: Tensor, eps: float
) -> Hidden:
    """Merge what split attention left on the way in."""
    assert isinstance(x, SplitPartials)
    add_split_output(residual, layer.weight, layer.bias, x)
    return Hidden(residual)


def _normed_within(
    hidden: Hidden, norm: Tensor, eps: float, layer: AnyLinear
) -> tuple[Tensor, Tensor | QuantisedWeight, Tensor | None, Tensor | None, float]:
    """Return what such a kernel multiplies, and by what norm first: none if it is at hand."""
    if hidden.normed is not None:
        return hidden.normed, layer.weight, layer.bias, None, 0.0
    return hidden.residual, layer.weight, layer.bias, norm, eps


# -- by Hopper's kernel that asks for weights ahead ---------------------------------------------------------


def streamed_linear(hidden: Hidden, norm: Tensor, eps: float, layer: Linear, tiles: Tiling) -> Tensor:
    return hopper_linear(_normed(hidden, norm, eps), layer.weight, layer.bias, tiles)


def streamed_gate(hidden: Hidden, norm: Tensor, eps: float, layer: Linear, tiles: Tiling) -> Tensor:
    return hopper_gated_linear(_normed(hidden, norm, eps), layer.weight, tiles, "silu")


def streamed_add(
    residual: Tensor, x: Tensor | SplitPartials, layer: Linear, norm: Tensor, eps: float, tiles: Tiling
) -> Hidden:
    """Leave parts of long sums to the norm, which adds them up together with the residual."""
    parts = hopper_linear_parts(whole(x), layer.weight, tiles)
    return _after_norm(*add_rms_norm(parts, residual, norm, eps))


# -- by Hopper's kernel of many tokens ----------------------------------------------------------------------


def matmul_linear(hidden: Hidden, norm: Tensor, eps: float, layer: Linear) -> Tensor:
    return hopper_matmul(_normed(hidden, norm, eps), layer.weight)


def matmul_gate(hidden: Hidden, norm: Tensor, eps: float, layer: Linear) -> Tensor:
    return hopper_matmul_silu(_normed(hidden, norm, eps), layer.weight)


def matmul_add(
    residual: Tensor, x: Tensor | SplitPartials, layer: Linear, norm: Tensor, eps: float
) -> Hidden:
    if not residual.is_contiguous():
        return library_add(residual, x, layer, norm, eps)
    hopper_matmul_add(residual, whole(x), layer.weight)
    return Hidden(residual, rms_norm(residual, norm, eps))


# -- by cuBLAS ----------------------------------------------------------------------------------------------


def library_linear(hidden: Hidden, norm: Tensor, eps: float, layer: AnyLinear) -> Tensor:
    return layer(_normed(hidden, norm, eps))


def library_gate(hidden: Hidden, norm: Tensor, eps: float, layer: AnyLinear) -> Tensor:
    return silu_mul(layer(_normed(hidden, norm, eps)))


def library_add(
    residual: Tensor, x: Tensor | SplitPartials, layer: AnyLinear, norm: Tensor, eps: float
) -> Hidden:
    return _after_norm(*add_rms_norm(layer(whole(x)), residual, norm, eps))


# -- by plain torch: the references -------------------------------------------------------------------------


def reference_linear(hidden: Hidden, norm: Tensor, eps: float, layer: AnyLinear) -> Tensor:
    x = hidden.normed
    return layer(rms_norm_reference(hidden.residual, norm, eps) if x is None else x)


def reference_gate(hidden: Hidden, norm: Tensor, eps: float, layer: AnyLinear) -> Tensor:
    return gated_reference(reference_linear(hidden, norm, eps, layer), "silu")


def reference_add(
    residual: Tensor, x: Tensor | SplitPartials, layer: AnyLinear, norm: Tensor, eps: float
) -> Hidden:
    assert isinstance(x, Tensor)
    return _after_norm(*add_rms_norm_reference(layer(x), residual, norm, eps))


# -- by ranks that have some of the inputs each -------------------------------------------------------------
# Their sum over the ranks, that with the residual and the norm are one operation of `kernels.parallel`.


def add_over_ranks(
    residual: Tensor, x: Tensor | SplitPartials, layer: AnyLinear, norm: Tensor, eps: float
) -> Hidden:
    return _sum_over_ranks(layer.part(whole(x)), residual, layer, norm, eps)


def fused_add_over_ranks(
    residual: Tensor, x: Tensor | SplitPartials, layer: AnyLinear, norm: Tensor, eps: float, by: FusedProduct
) -> Hidden:
    x = whole(x)
    part = torch.empty(len(x), layer.weight.shape[0], dtype=x.dtype, device=x.device)
    by(part, x, layer.weight, layer.bias, None, 0.0, gated=False, added=False)
    return _sum_over_ranks(part, residual, layer, norm, eps)


def matmul_add_over_ranks(
    residual: Tensor, x: Tensor | SplitPartials, layer: Linear, norm: Tensor, eps: float
) -> Hidden:
    return _sum_over_ranks(hopper_matmul(whole(x), layer.weight), residual, layer, norm, eps)


def streamed_add_over_ranks(
    residual: Tensor, x: Tensor | SplitPartials, layer: Linear, norm: Tensor, eps: float, tiles: Tiling
) -> Hidden:
    return _sum_over_ranks(
        hopper_linear(whole(x), layer.weight, layer.bias, tiles), residual, layer, norm, eps
    )


def streamed_parts_over_ranks(
    residual: Tensor, x: Tensor | SplitPartials, layer: Linear, norm: Tensor, eps: float, tiles: Tiling
) -> Hidden:
    """Leave parts of long sums to what sends them to the other ranks."""
    parts = hopper_linear_parts(whole(x), layer.weight, tiles)
    return _sum_over_ranks(parts, residual, layer, norm, eps)


def _sum_over_ranks(part: Tensor, residual: Tensor, layer: AnyLinear, norm: Tensor, eps: float) -> Hidden:
    assert layer.ranks is not None
    return _after_norm(*layer.ranks.add_rms_norm(part, residual, norm, eps))


# -- products added to the residual, of which the layer norm [T, N] is returned ----------------------------


def fused_add_layer_norm(
    residual: Tensor,
    x: Tensor,
    layer: AnyLinear,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    by: FusedProduct,
) -> Tensor:
    by(residual, x, layer.weight, layer.bias, None, 0.0, gated=False, added=True)
    return layer_norm(residual, weight, bias, eps)


def streamed_add_layer_norm(
    residual: Tensor,
    x: Tensor,
    layer: Linear,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    tiles: Tiling,
) -> Tensor:
    parts = hopper_linear_parts(x, layer.weight, tiles)
    return add_layer_norm(parts, residual, weight, bias, eps, layer.bias)


def matmul_add_layer_norm(
    residual: Tensor, x: Tensor, layer: Linear, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    if not residual.is_contiguous():
        return library_add_layer_norm(residual, x, layer, weight, bias, eps)
    hopper_matmul_add(residual, x, layer.weight)
    return layer_norm(residual, weight, bias, eps)


def library_add_layer_norm(
    residual: Tensor, x: Tensor, layer: AnyLinear, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    return add_layer_norm(layer(x), residual, weight, bias, eps)


def reference_add_layer_norm(
    residual: Tensor, x: Tensor, layer: AnyLinear, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    return add_layer_norm_reference(layer(x), residual, weight, bias, eps)


# -- the output head ----------------------------------------------------------------------------------------


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [T, K] by weight [N, K] -> [T, N], for an N as wide as a vocabulary."""
    if len(x) != 1:
        if suits_hopper_linear(x, weight):
            tiles = tiling(len(x), *weight.shape, gated=False, divided=False)
            if tiles is not None:
                return hopper_linear(x, weight, None, tiles)
        return torch.nn.functional.linear(x, weight)
    out = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.device)
    linear_of_one(out, x, weight, None, None, 0.0, gated=False, added=False)
    return out


def _normed(hidden: Hidden, norm: Tensor, eps: float) -> Tensor:
    return rms_norm(hidden.residual, norm, eps) if hidden.normed is None else hidden.normed


def _after_norm(normed: Tensor, residual: Tensor) -> Hidden:
    return Hidden(residual, normed)


def whole(x: Tensor | SplitPartials) -> Tensor:
    """Merge the splits of attention, if it left any."""
    return x if isinstance(x, Tensor) else x.merged()
