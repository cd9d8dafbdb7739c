"""The gated delta rule with the decays and betas that it takes, of decodes in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.recurrence.delta_chunks import delta_rule_of_chunks
from quire.kernels.recurrence.delta_gates import check_gates, delta_gates, delta_gates_reference
from quire.kernels.recurrence.delta_products import rows_of
from quire.kernels.recurrence.delta_rule import (
    check_rule,
    delta_rule_of_decodes,
    gated_delta_rule_reference,
)
from quire.kernels.recurrence.step import StateStep

Gates = tuple[Tensor, Tensor, float]


def delta_net(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gates: Gates, state: Tensor, step: StateStep
) -> Tensor:
    """Do what `gated_delta_rule` does -> [T, Hv, Dv], with q and k of length 1.

    a, b, and gates, which are a_log, dt_bias and most: of what `delta_gates` makes decays and betas.
    """
    a_log, dt_bias, most = gates
    check_gates(a, b, a_log, dt_bias)
    check_rule(q, k, v, a if a.shape == b.shape else a.unflatten(1, (b.shape[1], -1)), b, state)
    q, k, v, a, b = (rows_of(x) for x in (q, k, v, a, b))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if step.decodes:
        given = a_log.contiguous(), dt_bias.contiguous(), most
        delta_rule_of_decodes(q, k, v, a, b, state, step, out, normalised=True, gates=given)
    if len(step.chunks):
        decays, factors = delta_gates(a, b, *gates)
        chunks = step.chunks, step.last_used
        delta_rule_of_chunks(q, k, v, decays, factors, state, *chunks, out, normalised=True)
    return out


def delta_net_reference(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gates: Gates, state: Tensor, step: StateStep
) -> Tensor:
    """Do the same as `delta_net` in plain torch."""
    given = delta_gates_reference(a, b, *gates)
    return gated_delta_rule_reference(q, k, v, *given, state, step, normalised=True)
