"""Products into the residual of layers that norm what they add, by every kernel.

Each takes (residual [T, N], x [T, K], layer, inner norm, outer norm), adds the inner norm of the product to
the residual in place, and returns the outer norm of that [T, N]. Norms may be None.
See `pointwise.sandwich_norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quire.kernels.attention.splits import SplitPartials
from quire.kernels.linear.hopper_matmul import hopper_matmul
from quire.kernels.linear.hopper_stream import Tiling, hopper_linear_parts
from quire.kernels.linear.linear import Linear
from quire.kernels.linear.operations import AnyLinear, FusedProduct
from quire.kernels.linear.split_output import split_output
from quire.kernels.pointwise.norm import Norm
from quire.kernels.pointwise.sandwich_norm import sandwich_norm, sandwich_norm_reference

# Of a layer's kind a function takes what its recipe does, as `operations.ProjectIn` does.
AddSandwich: TypeAlias = Callable[[Tensor, Tensor, Any, "Norm | None", "Norm | None"], Tensor]


def fused_add(
    residual: Tensor, x: Tensor, layer: AnyLinear, inner: Norm | None, outer: Norm | None, by: FusedProduct
) -> Tensor:
    out = torch.empty(len(x), layer.weight.shape[0], dtype=x.dtype, device=x.device)
    by(out, x, layer.weight, layer.bias, None, 0.0, gated=False, added=False)
    return sandwich_norm(out, residual, inner, outer)


def matmul_add(residual: Tensor, x: Tensor, layer: Linear, inner: Norm | None, outer: Norm | None) -> Tensor:
    return sandwich_norm(hopper_matmul(x, layer.weight), residual, inner, outer)


def streamed_add(
    residual: Tensor, x: Tensor, layer: Linear, inner: Norm | None, outer: Norm | None, tiles: Tiling
) -> Tensor:
    """Leave parts of long sums to the norm."""
    return sandwich_norm(hopper_linear_parts(x, layer.weight, tiles), residual, inner, outer)


def merging_add(
    residual: Tensor, x: SplitPartials, layer: Linear, inner: Norm | None, outer: Norm | None
) -> Tensor:
    """Merge what split attention left on the way into the product."""
    return sandwich_norm(split_output(layer.weight, layer.bias, x), residual, inner, outer)


def library_add(
    residual: Tensor, x: Tensor, layer: AnyLinear, inner: Norm | None, outer: Norm | None
) -> Tensor:
    return sandwich_norm(layer(x), residual, inner, outer)


def reference_add(
    residual: Tensor, x: Tensor, layer: AnyLinear, inner: Norm | None, outer: Norm | None
) -> Tensor:
    return sandwich_norm_reference(layer(x), residual, inner, outer)
