"""Rows of weights in few bits: of several as one, in another order, before zeros, and by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.quantised.weight import QuantisedWeight


def joined(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Return weights of the same format and inputs as one, which has a copy of them below each other."""
    first = weights[0]
    if any((each.format, each.inputs) != (first.format, first.inputs) for each in weights):
        raise ValueError("weights of several formats or inputs are no weight together")
    return QuantisedWeight(
        first.format,
        first.inputs,
        torch.cat([each.codes for each in weights]),
        torch.cat([each.scales for each in weights], 1),
        _joined([each.zeros for each in weights]),
    )


def in_order(weight: QuantisedWeight, order: Tensor) -> QuantisedWeight:
    """Return a copy of the outputs of these numbers."""
    zeros = None if weight.zeros is None else weight.zeros.index_select(1, order)
    scales = weight.scales.index_select(1, order)
    return QuantisedWeight(weight.format, weight.inputs, weight.codes.index_select(0, order), scales, zeros)


def padded(weight: QuantisedWeight, rows: int) -> QuantisedWeight:
    """Return a copy with so many outputs behind its own that are zero."""
    zeros = None if weight.zeros is None else F.pad(weight.zeros, (0, rows))
    return QuantisedWeight(
        weight.format,
        weight.inputs,
        F.pad(weight.codes, (0, 0, 0, rows)),
        F.pad(weight.scales, (0, rows)),
        zeros,
    )


def alone(weight: QuantisedWeight) -> QuantisedWeight:
    """Return a view of rows as kernels read a weight: its scales and zero points stand beside each other."""
    zeros = None if weight.zeros is None else weight.zeros.contiguous()
    return QuantisedWeight(weight.format, weight.inputs, weight.codes, weight.scales.contiguous(), zeros)


def _joined(zeros: Sequence[Tensor | None]) -> Tensor | None:
    found = [each for each in zeros if each is not None]
    return torch.cat(found, 1) if found else None
