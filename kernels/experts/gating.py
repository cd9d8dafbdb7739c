"""What an expert does between its products, in fp32: an activation of the gate, times the up projection."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.experts.weights import Experts
from quire.kernels.pointwise.activation import ACTIVATIONS


def gated_reference(gate: Tensor, up: Tensor, experts: Experts) -> Tensor:
    """Compute gate [T, I] and up [T, I] -> [T, I] in plain torch."""
    if experts.activation == "clamped":
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        return (up + 1) * gate * (gate * experts.alpha).sigmoid()
    if experts.activation == "limited":
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        return gate * gate.sigmoid() * up
    return ACTIVATIONS[experts.activation](gate) * up


@triton.jit
def gated(
    gate: tl.tensor, up: tl.tensor, alpha: tl.tensor, limit: tl.tensor, ACTIVATION: tl.constexpr
) -> tl.tensor:
    """Do the same as `gated_reference` in a kernel."""
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit)
        return (up + 1.0) * gate * tl.sigmoid(gate * alpha)
    elif ACTIVATION == "limited":
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit)
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        return gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:  # tanh(z) is 2 sigmoid(2 z) - 1
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
