"""A layer's experts: few tokens row by row, many in groups. The host waits for nothing, orders are fixed."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.experts.few import few_experts
from quire.kernels.experts.gating import gated_reference
from quire.kernels.experts.grouped import grouped_experts
from quire.kernels.experts.weights import Experts

SHARED = 0.25  # pairs of few tokens to an expert, beyond which too many would read the same weights


def experts(x: Tensor, index: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """Compute tokens x [T, H] by the experts index [T, top], times weights [T, top], added up -> [T, H].

    A token's result is the same whatever other tokens are, if they are as many.
    """
    if not len(x):
        return torch.empty_like(x)
    few = len(x) == 1 or index.numel() <= SHARED * experts.count
    index, weights = index.contiguous(), weights.contiguous()
    return (few_experts if few else grouped_experts)(x, index, weights, experts)


def experts_reference(x: Tensor, index: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """Do the same as `experts` in plain torch."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(experts.count):
        token, place = torch.where(index == expert)
        gate_up = x[token] @ experts.gate_up[expert].T
        if experts.gate_up_bias is not None:
            gate_up = gate_up + experts.gate_up_bias[expert]
        if experts.interleaved:
            gate, up = gate_up[:, ::2], gate_up[:, 1::2]
        else:
            gate, up = gate_up.chunk(2, dim=1)
        result = gated_reference(gate, up, experts) @ experts.down[expert].T
        if experts.down_bias is not None:
            result = result + experts.down_bias[expert]
        out.index_add_(0, token, result.float() * weights[token, place, None].float())
    return out.to(x.dtype)
