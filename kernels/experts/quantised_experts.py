"""A layer's experts by weights in few bits: few tokens pair by pair, many in groups."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.experts.experts import experts_reference
from quire.kernels.experts.quantised import QuantisedExperts, expand_experts
from quire.kernels.experts.quantised_few import few_quantised_experts, tiled_quantised_experts
from quire.kernels.experts.quantised_stream import streamed_quantised_experts, suits
from quire.kernels.gpu import gpu_of

SHARED = 0.5  # pairs of few tokens to an expert, beyond which too many would read the same weights


def quantised_experts(x: Tensor, index: Tensor, weights: Tensor, experts: QuantisedExperts) -> Tensor:
    """Compute tokens x [T, H] by the experts index [T, top], times weights [T, top], added up -> [T, H].

    A token's result is the same whatever other tokens are, if they are as many.
    """
    gpu = gpu_of(x.device)
    if not gpu.has_kernels:
        return experts_reference(x, index, weights, expand_experts(experts, x.dtype))
    if not len(x):
        return torch.empty_like(x)
    x, index, weights = x.contiguous(), index.contiguous(), weights.contiguous()
    if len(x) == 1 or index.numel() <= SHARED * experts.count:
        return few_quantised_experts(x, index, weights, experts)
    streams = suits(experts, gpu, x.dtype)
    return (streamed_quantised_experts if streams else tiled_quantised_experts)(x, index, weights, experts)
