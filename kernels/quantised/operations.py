"""The products of a decoder layer by weights in few bits, as `linear.operations` has them by others."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from quire.kernels.attention.splits import SplitPartials
from quire.kernels.linear import sandwich
from quire.kernels.linear.operations import (
    Hidden,
    fused_add,
    fused_add_layer_norm,
    fused_add_over_ranks,
    fused_gate,
    fused_linear,
    whole,
)
from quire.kernels.pointwise.layer_norm import add_layer_norm
from quire.kernels.pointwise.norm import Norm, add_rms_norm, rms_norm
from quire.kernels.pointwise.sandwich_norm import sandwich_norm
from quire.kernels.quantised.few import quantised_of_few
from quire.kernels.quantised.linear import QuantisedLinear
from quire.kernels.quantised.stream import Tiling, stream_gated_linear, stream_linear, stream_linear_parts

# -- by the kernel of few tokens, with the norm or the sum ---------------------------------------------------

few_linear = partial(fused_linear, by=quantised_of_few)
few_gate = partial(fused_gate, by=quantised_of_few)
few_add = partial(fused_add, by=quantised_of_few)
few_add_over_ranks = partial(fused_add_over_ranks, by=quantised_of_few)
few_add_sandwich = partial(sandwich.fused_add, by=quantised_of_few)
few_add_layer_norm = partial(fused_add_layer_norm, by=quantised_of_few)


# -- by the same kernel, behind a norm: fp16 may not hold what is scaled only afterwards ---------------------


def normed_few_linear(hidden: Hidden, norm: Tensor, eps: float, layer: QuantisedLinear) -> Tensor:
    return few_linear(Hidden(hidden.residual, _normed(hidden, norm, eps)), norm, eps, layer)


def normed_few_gate(hidden: Hidden, norm: Tensor, eps: float, layer: QuantisedLinear) -> Tensor:
    return few_gate(Hidden(hidden.residual, _normed(hidden, norm, eps)), norm, eps, layer)


# -- by Hopper's kernel that asks for weights ahead ----------------------------------------------------------


def streamed_linear(
    hidden: Hidden, norm: Tensor, eps: float, layer: QuantisedLinear, tiles: Tiling
) -> Tensor:
    return stream_linear(_normed(hidden, norm, eps), layer.weight, layer.bias, tiles)


def streamed_gate(hidden: Hidden, norm: Tensor, eps: float, layer: QuantisedLinear, tiles: Tiling) -> Tensor:
    return stream_gated_linear(_normed(hidden, norm, eps), layer.weight, layer.bias, tiles)


def streamed_add(
    residual: Tensor,
    x: Tensor | SplitPartials,
    layer: QuantisedLinear,
    norm: Tensor,
    eps: float,
    tiles: Tiling,
) -> Hidden:
    """Leave parts of long sums to the norm, which adds them up together with the residual."""
    parts = stream_linear_parts(whole(x), layer.weight, tiles)
    normed, residual = add_rms_norm(parts, residual, norm, eps)
    return Hidden(residual, normed)


def streamed_add_over_ranks(
    residual: Tensor,
    x: Tensor | SplitPartials,
    layer: QuantisedLinear,
    norm: Tensor,
    eps: float,
    tiles: Tiling,
) -> Hidden:
    """Leave parts of long sums to what sends them to the other ranks."""
    assert layer.ranks is not None
    parts = stream_linear_parts(whole(x), layer.weight, tiles)
    normed, residual = layer.ranks.add_rms_norm(parts, residual, norm, eps)
    return Hidden(residual, normed)


def streamed_add_sandwich(
    residual: Tensor,
    x: Tensor,
    layer: QuantisedLinear,
    inner: Norm | None,
    outer: Norm | None,
    tiles: Tiling,
) -> Tensor:
    """Leave parts of long sums to the norms."""
    return sandwich_norm(stream_linear_parts(x, layer.weight, tiles), residual, inner, outer)


def streamed_add_layer_norm(
    residual: Tensor,
    x: Tensor,
    layer: QuantisedLinear,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    tiles: Tiling,
) -> Tensor:
    parts = stream_linear_parts(x, layer.weight, tiles)
    return add_layer_norm(parts, residual, weight, bias, eps, layer.bias)


def _normed(hidden: Hidden, norm: Tensor, eps: float) -> Tensor:
    return rms_norm(hidden.residual, norm, eps) if hidden.normed is None else hidden.normed
