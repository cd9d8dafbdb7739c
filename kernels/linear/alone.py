"""Products that stand alone, outside a planned layer: the kernel is chosen as it is for a layer's products."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quire.kernels.gpu import Gpu, gpu_of
from quire.kernels.linear import skinny
from quire.kernels.linear.gemv import linear_of_one
from quire.kernels.linear.linear import Linear, Matrix
from quire.kernels.linear.operations import Hidden, ProjectIn
from quire.kernels.linear.recipes import PROJECT_IN, Product
from quire.kernels.pointwise.activation import UNGATED, UngatedActivation, activated
from quire.kernels.recipes import Chosen, choose
from quire.kernels.tuning import H100, Tuning


@lru_cache(maxsize=4096)
def plan_product(
    gpu: Gpu, dtype: torch.dtype, tokens: int, weight: Matrix, tuning: Tuning = H100
) -> Chosen[ProjectIn]:
    """Return what multiplies tokens by a weight, of a `Hidden` whose norm is at hand."""
    narrow = weight.inputs <= tuning.fused_columns
    fit = skinny.supports(gpu, dtype, 1, weight, gated=False)
    fused = tokens <= (skinny.MOST_TOKENS if narrow and fit else 1) and gpu.has_kernels
    return choose(PROJECT_IN, Product(gpu, dtype, tokens, weight, tuning, fused))


def linear(x: Tensor, layer: Linear) -> Tensor:
    """Multiply x [T, K] by the whole weight -> [T, N]; with some of the inputs here, sum over the ranks."""
    if layer.ranks is not None or not len(x):
        return layer(x)
    x = x.contiguous()
    chosen = plan_product(gpu_of(x.device), x.dtype, len(x), layer.matrix)
    return chosen.run(Hidden(x, x), layer.weight, 0.0, layer)


def activated_linear(x: Tensor, layer: Linear, activation: UngatedActivation) -> Tensor:
    """Compute the activation of `linear` of x."""
    if len(x) != 1 or layer.ranks is not None or not layer.weight.is_contiguous():
        return activated(linear(x, layer), activation)
    out = torch.empty(1, layer.weight.shape[0], dtype=x.dtype, device=x.device)
    linear_of_one(
        out, x, layer.weight, layer.bias, None, 0.0, gated=False, added=False, activation=activation
    )
    return out


def linear_reference(x: Tensor, layer: Linear) -> Tensor:
    """Do the same as `linear` in plain torch."""
    return layer(x)


def activated_linear_reference(x: Tensor, layer: Linear, activation: UngatedActivation) -> Tensor:
    """Do the same as `activated_linear` in plain torch."""
    return UNGATED[activation](layer(x))
