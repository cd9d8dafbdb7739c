"""Products outside a planned layer by weights in few bits, as `linear.alone` has them by others."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quire.kernels.attention.splits import SplitPartials
from quire.kernels.gpu import Gpu, gpu_of
from quire.kernels.linear.linear import Matrix
from quire.kernels.linear.operations import AddLayerNorm, Hidden, ProjectIn, whole
from quire.kernels.linear.recipes import Product
from quire.kernels.linear.sandwich import AddSandwich
from quire.kernels.pointwise.activation import Activation, gated
from quire.kernels.pointwise.layer_norm import add_layer_norm
from quire.kernels.pointwise.norm import Norm
from quire.kernels.pointwise.sandwich_norm import sandwich_norm
from quire.kernels.quantised import recipes
from quire.kernels.quantised.expand import DTYPES
from quire.kernels.quantised.linear import QuantisedLinear
from quire.kernels.recipes import Chosen, choose

_NO_NORM = torch.empty(0)  # of a `Hidden` whose norm is at hand


def linear(x: Tensor, layer: QuantisedLinear) -> Tensor:
    """Multiply x [T, K] by the whole weight -> [T, N]; with some of the inputs here, sum over the ranks."""
    if not _has_kernels(x):
        return layer(x)
    x = x.contiguous()
    chosen = plan_linear(gpu_of(x.device), x.dtype, len(x), layer.matrix)
    out = chosen.run(Hidden(x, x), _NO_NORM, 0.0, QuantisedLinear(layer.weight, layer.bias))
    return out if layer.ranks is None else layer.ranks.all_reduce(out)


def gated_linear(x: Tensor, layer: QuantisedLinear, activation: Activation) -> Tensor:
    """Compute activation(gate) · up of x [T, K] by a fused gate and up projection [2I, K] -> [T, I]."""
    if activation != "silu" or layer.ranks is not None or not _has_kernels(x):
        return gated(linear(x, layer), activation)
    x = x.contiguous()
    chosen = plan_gated_linear(gpu_of(x.device), x.dtype, len(x), layer.matrix)
    return chosen.run(Hidden(x, x), _NO_NORM, 0.0, layer)


def add_linear(
    residual: Tensor,
    x: Tensor,
    layer: QuantisedLinear,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Add `linear` of x to residual [T, N] in place; return the layer norm of the sum [T, N]."""
    if layer.ranks is not None or not residual.is_contiguous() or not _has_kernels(x):
        return add_layer_norm(linear(x, layer), residual, weight, bias, eps)
    x = x.contiguous()
    chosen = plan_add_linear(gpu_of(x.device), x.dtype, len(x), layer.matrix)
    return chosen.run(residual, x, layer, weight, bias, eps)


def add_normed_linear(
    residual: Tensor,
    x: Tensor | SplitPartials,
    layer: QuantisedLinear,
    inner: Norm | None,
    outer: Norm | None,
) -> Tensor:
    """Add the inner norm of `linear` of x to residual [T, N] in place; return the outer norm of the sum."""
    x = whole(x)
    if layer.ranks is not None or not _has_kernels(x):
        return sandwich_norm(linear(x, layer), residual, inner, outer)
    x = x.contiguous()
    chosen = plan_add_normed_linear(gpu_of(x.device), x.dtype, len(x), layer.matrix)
    return chosen.run(residual, x, layer, inner, outer)


@lru_cache(maxsize=4096)  # steps without a graph have any number of tokens
def plan_linear(gpu: Gpu, dtype: torch.dtype, tokens: int, weight: Matrix) -> Chosen[ProjectIn]:
    """Return what multiplies tokens, a `Hidden` with its norm at hand, by a weight."""
    return choose(recipes.QUANTISED_IN, _product(gpu, dtype, tokens, weight))


@lru_cache(maxsize=4096)
def plan_gated_linear(gpu: Gpu, dtype: torch.dtype, tokens: int, weight: Matrix) -> Chosen[ProjectIn]:
    """Return what computes SiLU of a gate times an up projection of tokens, their norm at hand."""
    return choose(recipes.QUANTISED_GATE, _product(gpu, dtype, tokens, weight))


@lru_cache(maxsize=4096)
def plan_add_linear(gpu: Gpu, dtype: torch.dtype, tokens: int, weight: Matrix) -> Chosen[AddLayerNorm]:
    """Return what adds a product of tokens to the residual, and gives the layer norm of that."""
    return choose(recipes.QUANTISED_ADD_LAYER_NORM, _product(gpu, dtype, tokens, weight))


@lru_cache(maxsize=4096)
def plan_add_normed_linear(gpu: Gpu, dtype: torch.dtype, tokens: int, weight: Matrix) -> Chosen[AddSandwich]:
    """Return what adds a norm of a product of tokens to the residual, and gives another norm of that."""
    return choose(recipes.QUANTISED_ADD_SANDWICH, _product(gpu, dtype, tokens, weight))


def _product(gpu: Gpu, dtype: torch.dtype, tokens: int, weight: Matrix) -> Product:
    fused = tokens <= recipes.most_fused_tokens(gpu, dtype)
    return Product(gpu, dtype, tokens, weight, fused=fused)


def _has_kernels(x: Tensor) -> bool:
    return len(x) > 0 and x.dtype in DTYPES
