"""Norms of a model that are what kernels here compute: found by parameters, proved by numbers."""

from __future__ import annotations

import torch
from torch import nn

from quire.engine.models.general.proof import ROWS, TOLERANCE, alike, called, noise
from quire.engine.models.layers import LayerNorm
from quire.kernels.pointwise.layer_norm import layer_norm_reference
from quire.kernels.pointwise.norm import Norm, rms_norm_reference


def norm_of(module: nn.Module) -> Norm | None:
    """Return the RMSNorm that a module is; fp32 weights are one more than the module's."""
    named = dict(module.named_parameters())
    weight = named.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if [*named] != ["weight"] or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if weight.dtype not in TOLERANCE:
        return None
    # Small ones show the epsilon, and what they have in common tells it from a layer norm.
    sizes = torch.tensor([[1e-3], [1e-2], [1.0], [30.0]], device=weight.device)
    x = (sizes * (noise(ROWS, len(weight), weight).float() + 0.5)).to(weight.dtype)
    theirs = called(module, x)
    if theirs is None:
        return None
    found = [(each, rms_norm_reference(x, each, eps)) for each in (weight.data, 1.0 + weight.data.float())]
    # Both are alike where weights are large.
    candidate, ours = min(found, key=lambda each: float((each[1].float() - theirs.float()).norm()))
    return Norm(candidate, eps) if alike(ours, theirs) else None


def layer_norm_of(module: nn.Module) -> LayerNorm | None:
    """Return the layer norm that a module is."""
    named = dict(module.named_parameters())
    weight, bias = named.get("weight"), named.get("bias")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not {"weight"} <= {*named} <= {"weight", "bias"} or weight is None or weight.dim() != 1:
        return None
    if weight.dtype not in TOLERANCE or not isinstance(eps, float):
        return None
    sizes = torch.tensor([[1e-3], [1e-2], [1.0], [30.0]], device=weight.device)  # as above
    x = (sizes * (noise(ROWS, len(weight), weight).float() + 0.5)).to(weight.dtype)
    theirs = called(module, x)
    for candidate in (weight.data, weight.data + 1):
        if theirs is not None and alike(layer_norm_reference(x, candidate, bias, eps), theirs):
            return LayerNorm(candidate, None if bias is None else bias.data, eps)
    return None
