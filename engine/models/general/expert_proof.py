"""What proves that kernels compute experts by weights in few bits: a few of them by their own code."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.models.general.expert_modules import DOWN, GATE_UP, bare_of
from quire.engine.models.general.experts import computes_quantised
from quire.kernels.experts.quantised import QuantisedExperts, expand_experts
from quire.kernels.experts.weights import Experts
from quire.kernels.quantised.weight import LINE, QuantisedWeight, WeightFormat, quantise

_FEW = 3  # experts that are compared


def is_computed(module: Any, forms: Sequence[WeightFormat]) -> bool:
    """Tell whether the code of a module's class computes what kernels do by weights in these formats.

    module: experts whose weights need not be anywhere. forms: of gate and up, and of down. Small ones are
    drawn, and computed on a CPU.
    """
    device = torch.device("cpu")
    bare = bare_of(module, device)
    if bare is None:
        return False
    lines = math.lcm(LINE, *(form.group for form in forms if form.group))
    hidden, inner = 2 * lines, lines
    generator = torch.Generator().manual_seed(3)

    def drawn(form: WeightFormat, outputs: int, inputs: int) -> QuantisedWeight:
        weight = QuantisedWeight.empty(form, outputs, inputs, device)
        weight.fill(quantise(torch.randn(outputs, inputs, generator=generator), form))
        return weight

    biases = [torch.randn(_FEW, size, generator=generator) for size in (2 * inner, hidden)]
    weights = drawn(forms[0], _FEW * 2 * inner, hidden), drawn(forms[1], _FEW * hidden, inner)
    return are_computed(module, quantised_of(bare, *weights, _FEW, biases if module.has_bias else None))


def are_computed(module: Any, found: QuantisedExperts, dtype: torch.dtype = torch.float32) -> bool:
    """Tell whether kernels compute of the first few experts what the module's code does of their numbers.

    dtype: that kernels compute in; the code does so in fp32.
    """
    few = _first(found, min(_FEW, found.count))
    return computes_quantised(_stand_in(module, expand_experts(few, torch.float32)), few, dtype)


def quantised_of(
    bare: Experts,
    gate_up: QuantisedWeight,
    down: QuantisedWeight,
    count: int,
    biases: Sequence[Tensor] | None,
) -> QuantisedExperts:
    """Return experts with what they do between their products as `experts.bare_of` has it.

    biases: of gate and up as `gate_up` has its rows, and of down.
    """
    of_up, of_down = biases or (None, None)
    return QuantisedExperts(
        gate_up, down, count, of_up, of_down, activation=bare.activation, alpha=bare.alpha, limit=bare.limit
    )


def _first(found: QuantisedExperts, count: int) -> QuantisedExperts:
    """Return the first of some experts."""

    def of(weight: QuantisedWeight) -> QuantisedWeight:
        rows = weight.rows(0, weight.shape[0] // found.count * count)
        zeros = None if rows.zeros is None else rows.zeros.contiguous()
        return QuantisedWeight(rows.format, rows.inputs, rows.codes, rows.scales.contiguous(), zeros)

    biases = [None if each is None else each[:count] for each in (found.gate_up_bias, found.down_bias)]
    return replace(
        found,
        gate_up=of(found.gate_up),
        down=of(found.down),
        count=count,
        gate_up_bias=biases[0],
        down_bias=biases[1],
    )


def _stand_in(module: Any, few: Experts) -> nn.Module:
    """Return a module like it, with the weights of a few experts as its code takes them."""
    weights: dict[str, Tensor | None] = {
        GATE_UP: few.gate_up,
        DOWN: few.down,
        f"{GATE_UP}_bias": few.gate_up_bias,
        f"{DOWN}_bias": few.down_bias,
    }
    if not getattr(module, "is_concatenated", True):
        for name in (GATE_UP, f"{GATE_UP}_bias"):
            rows = weights[name]
            weights[name] = None if rows is None else _alternating(rows)
    stand_in = copy.copy(module)
    stand_in._parameters = {}
    for name, weight in weights.items():
        if weight is not None:
            own = weight.transpose(1, 2) if module.is_transposed and weight.dim() == 3 else weight
            stand_in.register_parameter(name, nn.Parameter(own, requires_grad=False))
    return stand_in


def _alternating(rows: Tensor) -> Tensor:
    """Have rows [E, 2I, ...] of gate and up take turns, where the gate's came first."""
    return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)
