"""Products outside a planned layer, whose kernels are chosen when they are called, as those of layers are."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from quire.kernels.attention.splits import SplitPartials
from quire.kernels.gpu import Gpu, gpu_of
from quire.kernels.linear import skinny
from quire.kernels.linear.gemv import linear_of_one
from quire.kernels.linear.hopper_stream import hopper_gated_linear, suits_hopper_linear, tiling
from quire.kernels.linear.linear import Linear, Matrix
from quire.kernels.linear.operations import AddLayerNorm, AnyLinear, Hidden, ProjectIn
from quire.kernels.linear.recipes import ADD_LAYER_NORM, ADD_SANDWICH, GATE, PROJECT_IN, Product
from quire.kernels.linear.sandwich import AddSandwich, merging_add
from quire.kernels.pointwise.activation import (
    UNGATED,
    Activation,
    UngatedActivation,
    activated,
    gated,
    gated_reference,
)
from quire.kernels.pointwise.layer_norm import add_layer_norm, add_layer_norm_reference
from quire.kernels.pointwise.norm import Norm
from quire.kernels.pointwise.sandwich_norm import sandwich_norm, sandwich_norm_reference
from quire.kernels.quantised import alone as quantised
from quire.kernels.quantised.linear import QuantisedLinear
from quire.kernels.recipes import Chosen, choose
from quire.kernels.tuning import streams, tuning_of

LEAST_STREAMED = 1 << 22  # elements of a weight: smaller ones, as routers', were not measured


def linear(x: Tensor, layer: AnyLinear) -> Tensor:
    """Multiply x [T, K] by the whole weight -> [T, N]; with some of the inputs here, sum over the ranks."""
    if isinstance(layer, QuantisedLinear):
        return quantised.linear(x, layer)
    if not _has_kernels(x, layer):
        return layer(x)
    x = x.contiguous()
    chosen = plan_linear(gpu_of(x.device), x.dtype, len(x), layer.matrix)
    return chosen.run(Hidden(x, x), layer.weight, 0.0, layer)


def activated_linear(x: Tensor, layer: AnyLinear, activation: UngatedActivation) -> Tensor:
    """Compute the activation of `linear` of x."""
    if isinstance(layer, QuantisedLinear) or len(x) != 1 or not _has_kernels(x, layer):
        return activated(linear(x, layer), activation)
    out = torch.empty(1, layer.weight.shape[0], dtype=x.dtype, device=x.device)
    linear_of_one(
        out, x, layer.weight, layer.bias, None, 0.0, gated=False, added=False, activation=activation
    )
    return out


def gated_linear(x: Tensor, layer: AnyLinear, activation: Activation) -> Tensor:
    """Compute activation(gate) · up of x [T, K] by a fused gate and up projection [2I, K] -> [T, I]."""
    if isinstance(layer, QuantisedLinear):
        return quantised.gated_linear(x, layer, activation)
    if not _has_kernels(x, layer):
        return gated(layer(x), activation)
    x = x.contiguous()
    if activation == "silu":
        chosen = plan_gated_linear(gpu_of(x.device), x.dtype, len(x), layer.matrix)
        return chosen.run(Hidden(x, x), layer.weight, 0.0, layer)
    if len(x) != 1:
        if layer.bias is None and suits_hopper_linear(x, layer.weight):
            tiles = tiling(len(x), *layer.weight.shape, gated=True, divided=False)
            if tiles is not None:
                return hopper_gated_linear(x, layer.weight, tiles, activation)
        return gated(linear(x, layer), activation)
    out = torch.empty(1, layer.weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    linear_of_one(out, x, layer.weight, layer.bias, None, 0.0, gated=True, added=False, activation=activation)
    return out


def add_linear(
    residual: Tensor, x: Tensor, layer: AnyLinear, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Add `linear` of x to residual [T, N] in place; return the layer norm of the sum [T, N]."""
    if isinstance(layer, QuantisedLinear):
        return quantised.add_linear(residual, x, layer, weight, bias, eps)
    if not _has_kernels(x, layer):
        return add_layer_norm(layer(x), residual, weight, bias, eps)
    x = x.contiguous()
    chosen = plan_add_linear(gpu_of(x.device), x.dtype, len(x), layer.matrix)
    return chosen.run(residual, x, layer, weight, bias, eps)


def add_normed_linear(
    residual: Tensor, x: Tensor | SplitPartials, layer: AnyLinear, inner: Norm | None, outer: Norm | None
) -> Tensor:
    """Add the inner norm of `linear` of x to residual [T, N] in place; return the outer norm of the sum.

    As `sandwich_norm` does of what the product gives. x may be attention that is still to be merged.
    """
    if isinstance(layer, QuantisedLinear):
        return quantised.add_normed_linear(residual, x, layer, inner, outer)
    if isinstance(x, SplitPartials):
        return merging_add(residual, x, layer, inner, outer)
    if not _has_kernels(x, layer):
        return sandwich_norm(layer(x), residual, inner, outer)
    x = x.contiguous()
    chosen = plan_add_normed_linear(gpu_of(x.device), x.dtype, len(x), layer.matrix)
    return chosen.run(residual, x, layer, inner, outer)


@lru_cache(maxsize=4096)  # steps without a graph have any number of tokens
def plan_linear(gpu: Gpu, dtype: torch.dtype, tokens: int, weight: Matrix) -> Chosen[ProjectIn]:
    """Return what multiplies tokens, a `Hidden` with its norm at hand, by a weight."""
    return choose(PROJECT_IN, _into_branch(_product(gpu, dtype, tokens, weight)))


@lru_cache(maxsize=4096)
def plan_gated_linear(gpu: Gpu, dtype: torch.dtype, tokens: int, weight: Matrix) -> Chosen[ProjectIn]:
    """Return what computes SiLU of a gate times an up projection of tokens, their norm at hand."""
    return choose(GATE, _into_branch(_product(gpu, dtype, tokens, weight, gated=True)))


@lru_cache(maxsize=4096)
def plan_add_linear(gpu: Gpu, dtype: torch.dtype, tokens: int, weight: Matrix) -> Chosen[AddLayerNorm]:
    """Return what adds a product of tokens to the residual, and gives the layer norm of that."""
    return choose(ADD_LAYER_NORM, _product(gpu, dtype, tokens, weight))


@lru_cache(maxsize=4096)
def plan_add_normed_linear(gpu: Gpu, dtype: torch.dtype, tokens: int, weight: Matrix) -> Chosen[AddSandwich]:
    """Return what adds a norm of a product of tokens to the residual, and gives another norm of that."""
    product = _product(gpu, dtype, tokens, weight)
    large = weight.elements >= LEAST_STREAMED
    streamed = large and streams(product.tuning.streamed_out, tokens, weight.outputs)
    return choose(ADD_SANDWICH, replace(product, streamed=streamed))


def _product(gpu: Gpu, dtype: torch.dtype, tokens: int, weight: Matrix, *, gated: bool = False) -> Product:
    tuning = tuning_of(gpu)
    fits = skinny.supports(gpu, dtype, 1, weight, gated=gated)
    most = skinny.most_tokens(gpu, dtype, weight.inputs, tuning) if fits else 1
    fused = gpu.has_kernels and tokens <= most
    return Product(gpu, dtype, tokens, weight, tuning, fused)


def _into_branch(product: Product) -> Product:
    """Return what is known of a product of a layer's hidden states."""
    large = product.weight.elements >= LEAST_STREAMED
    streamed = large and streams(product.tuning.streamed_in, product.tokens, product.weight.inputs)
    return replace(product, streamed=streamed)


def _has_kernels(x: Tensor, layer: Linear) -> bool:
    """Tell whether kernels take a product: of the whole, and of one dtype."""
    same = x.dtype == layer.weight.dtype and layer.weight.is_contiguous()
    return len(x) > 0 and same and layer.ranks is None


def linear_reference(x: Tensor, layer: AnyLinear) -> Tensor:
    """Do the same as `linear` in plain torch."""
    return layer(x)


def activated_linear_reference(x: Tensor, layer: AnyLinear, activation: UngatedActivation) -> Tensor:
    """Do the same as `activated_linear` in plain torch."""
    return UNGATED[activation](layer(x))


def gated_linear_reference(x: Tensor, layer: AnyLinear, activation: Activation) -> Tensor:
    """Do the same as `gated_linear` in plain torch."""
    return gated_reference(layer(x), activation)


def add_linear_reference(
    residual: Tensor, x: Tensor, layer: AnyLinear, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Do the same as `add_linear` in plain torch."""
    return add_layer_norm_reference(layer(x), residual, weight, bias, eps)


def add_normed_linear_reference(
    residual: Tensor, x: Tensor | SplitPartials, layer: AnyLinear, inner: Norm | None, outer: Norm | None
) -> Tensor:
    """Do the same as `add_normed_linear` in plain torch."""
    assert isinstance(x, Tensor)
    return sandwich_norm_reference(layer(x), residual, inner, outer)
