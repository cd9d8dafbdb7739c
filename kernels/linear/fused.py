"""Linear layers of one token or a few, fused with what comes before and after them.

So few tokens are bound by reading the weights, and between kernels nobody reads: so a layer is few kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.linear.gemv import linear_of_one
from quire.kernels.linear.skinny import MOST_TOKENS, few_tokens_fit, few_tokens_suit_one, linear_of_few
from quire.kernels.pointwise.activation import silu_mul_reference
from quire.kernels.pointwise.norm import rms_norm_reference


def most_fused_tokens(
    hidden_size: int, inner_sizes: tuple[int, ...], qkv_size: int, dtype: torch.dtype
) -> int:
    """Up to how many tokens layers are quicker fused.

    `inner_sizes` are other widths that they take in, `qkv_size` is one that only comes out of them.
    """
    return MOST_TOKENS if few_tokens_fit(hidden_size, inner_sizes, qkv_size, dtype) else 1


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """RMSNorm of x [T, K] by norm [K], times weight [N, K], plus bias [N] or None -> [T, N].

    The normalised x is not rounded to its dtype in between, or only before it is scaled.
    """
    out = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.device)
    _launch(out, x, weight, bias, norm, eps, gated=False, added=False)
    return out


def norm_silu_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `norm_linear` of a fused gate and up projection, weight [2I, K], then silu(gate) · up -> [T, I]."""
    out = torch.empty(len(x), weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    _launch(out, x, weight, bias, norm, eps, gated=True, added=False)
    return out


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """residual [T, N] += x [T, K] times weight [N, K], plus bias [N] or None; in place."""
    _launch(residual, x, weight, bias, None, 0.0, gated=False, added=True)


def norm_linear_reference(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same as `norm_linear` in plain torch, of any number of tokens."""
    return F.linear(rms_norm_reference(x, norm, eps), weight, bias)


def norm_silu_linear_reference(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The same as `norm_silu_linear` in plain torch, of any number of tokens."""
    return silu_mul_reference(norm_linear_reference(x, norm, eps, weight, bias))


def add_linear_reference(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The same as `add_linear` in plain torch, of any number of tokens."""
    residual += F.linear(x, weight, bias)


def _launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    *,
    gated: bool,
    added: bool,
) -> None:
    launch = linear_of_few if len(x) > 1 or few_tokens_suit_one(x, weight) else linear_of_one
    launch(out, x, weight, bias, norm, eps, gated=gated, added=added)
