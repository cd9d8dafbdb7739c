"""A layer's experts by weights in few bits."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.experts.experts import experts_reference
from quire.kernels.experts.quantised import QuantisedExperts, expand_experts


def quantised_experts(x: Tensor, index: Tensor, weights: Tensor, experts: QuantisedExperts) -> Tensor:
    """Compute as `experts.experts` does."""
    return experts_reference(x, index, weights, expand_experts(experts, x.dtype))
