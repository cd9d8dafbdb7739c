"""The weights of a layer's experts in few bits, and their products in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.experts.weights import Experts, Limited
from quire.kernels.pointwise.activation import Activation
from quire.kernels.quantised.weight import QuantisedWeight, WeightFormat, expand_reference


@dataclass(frozen=True, slots=True)
class QuantisedExperts:
    """E gated MLPs as `weights.Experts` are, whose weights stand below each other: [E · outputs, inputs].

    gate_up [E · 2I, H] has an expert's gate first and then its up projection, and so has gate_up_bias
    [E, 2I]; down [E · H, I], down_bias [E, H].
    """

    gate_up: QuantisedWeight
    down: QuantisedWeight
    count: int
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Activation | Limited = "silu"
    alpha: float = 0.0
    limit: float = 0.0

    @property
    def hidden(self) -> int:
        return self.gate_up.inputs

    @property
    def inner(self) -> int:
        return self.down.inputs


def takes(form: WeightFormat, dtype: torch.dtype) -> bool:
    """Tell whether kernels multiply tokens of a dtype by experts whose weights are kept so."""
    return dtype == torch.bfloat16 or (dtype == torch.float16 and form.codes != "float4")


def expand_experts(experts: QuantisedExperts, dtype: torch.dtype) -> Experts:
    """Return the experts with the numbers that their weights stand for."""

    def stacked(weight: QuantisedWeight) -> Tensor:
        return expand_reference(weight, dtype).view(experts.count, -1, weight.inputs)

    def cast(bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.to(dtype)

    return Experts(
        stacked(experts.gate_up),
        stacked(experts.down),
        cast(experts.gate_up_bias),
        cast(experts.down_bias),
        activation=experts.activation,
        alpha=experts.alpha,
        limit=experts.limit,
    )
