"""Mamba's scan from any state on: transformers' own begins with none, so that a prompt would be one piece.

Mamba: Linear-Time Sequence Modeling with Selective State Spaces (Gu and Dao, 2023), section 3.2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "mamba_selective_scan"  # of the function in modelling code


def selective_scan(
    state: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Scan x [S, E, T] from `state` [S, E, N] on, None: zeros; return outputs [S, E, T] and the state behind.

    dt [S, E, T], A [E, N], B and C [S, N, T], D [E] and a gate z [S, E, T], as transformers' code has them.
    """
    steps = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    steps = F.softplus(steps) if delta_softplus else steps
    decay = torch.exp(A[None, :, None, :] * steps[..., None])
    added = steps[..., None] * B.transpose(1, 2)[:, None].float() * x[..., None].float()
    now = torch.zeros_like(added[:, :, 0]) if state is None else state.float()
    seen = []
    for token in range(x.shape[-1]):
        now = decay[:, :, token] * now + added[:, :, token]
        seen.append(torch.matmul(now.to(x.dtype), C[:, :, token, None])[..., 0])
    out = torch.stack(seen, dim=-1)
    if D is not None:
        out = out + x * D[None, :, None]
    if z is not None:
        out = out * F.silu(z)
    return out.to(x.dtype), now
