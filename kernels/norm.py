"""RMSNorm (Zhang & Sennrich 2019), alone and fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H], weight [H] -> [T, H]: normalised in fp32, cast to x's dtype, then times weight."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [T, H], residual [T, H] -> (RMSNorm of their sum, residual). Adds x to residual in place."""
    residual += x
    return rms_norm_reference(residual, weight, eps), residual
