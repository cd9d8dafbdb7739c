"""The gated delta rule with decays, betas and the norm that are around it in a net: of decodes one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.kernels.pointwise.gated_norm import GatedNorm, gated_norm_into, gated_norm_reference
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
MOST_ALONE = 128  # heads of all decodes, and
MOST_NUMBERS = 128 * 128  # numbers of a head's state, whose results the kernel of decodes normalises itself


def delta_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gates: Gates,
    gate: Tensor,
    norm: GatedNorm,
    state: Tensor,
    step: StateStep,
) -> Tensor:
    """Do what `gated_delta_rule` does, with q and k of length 1, and normalise heads -> [T, Hv * Dv].

    a, b, and gates, which are a_log, dt_bias and most: of what `delta_gates` makes decays and betas. gate
    [T, Hv * Dv]; norm: of groups that are heads. What decodes get does not depend on the chunks beside them.
    """
    a_log, dt_bias, most = gates
    check_gates(a, b, a_log, dt_bias)
    check_rule(q, k, v, a if a.shape == b.shape else a.unflatten(1, (b.shape[1], -1)), b, state)
    _check_norm(v, gate, norm)
    q, k, v, a, b, gate = (rows_of(x) for x in (q, k, v, a, b, gate))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    normed = norms_alone(state, step.decodes)
    seen = out if normed and not len(step.chunks) else torch.empty_like(out)
    if step.decodes:
        further: dict[str, Any] = {"gates": (a_log.contiguous(), dt_bias.contiguous(), most)}
        further |= {"norm": (gate, norm)} if normed else {}
        into = out if normed else seen
        delta_rule_of_decodes(q, k, v, a, b, state, step, into, normalised=True, **further)
    if len(step.chunks):
        decays, factors = delta_gates(a, b, *gates)
        if normed:  # what a decode that pads has is nobody's, unless a chunk's token is there
            seen[: step.decodes].zero_()
        chunks = step.chunks, step.last_used
        delta_rule_of_chunks(q, k, v, decays, factors, state, *chunks, seen, normalised=True)
    if seen is not out:
        gated_norm_into(seen.flatten(1), gate, norm, out.flatten(1), step.after if normed else None)
    return out.flatten(1)


def norms_alone(state: Tensor, decodes: int) -> bool:
    """Return whether the kernel of so many decodes normalises what they see, over states [*, Hv, Dk, Dv].

    Then a program has all of a head's state, whose registers leave a multiprocessor no room for another one:
    so it is for decodes that have a multiprocessor for each head.
    """
    heads, keys, values = state.shape[1:]
    return 0 < decodes * heads <= MOST_ALONE and keys * values <= MOST_NUMBERS


def delta_net_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gates: Gates,
    gate: Tensor,
    norm: GatedNorm,
    state: Tensor,
    step: StateStep,
) -> Tensor:
    """Do the same as `delta_net` in plain torch."""
    _check_norm(v, gate, norm)
    given = delta_gates_reference(a, b, *gates)
    seen = gated_delta_rule_reference(q, k, v, *given, state, step, normalised=True)
    return gated_norm_reference(seen.flatten(1), gate, norm)


def _check_norm(v: Tensor, gate: Tensor, norm: GatedNorm) -> None:
    tokens, heads, width = v.shape
    if norm.groups != heads or norm.weight.shape != (heads * width,) or gate.shape != (tokens, heads * width):
        raise ValueError(
            f"a gate {tuple(gate.shape)} and a norm of {norm.groups} groups of {len(norm.weight)} numbers do "
            f"not fit values {tuple(v.shape)}: expected [T, Hv * Dv] and a group for each head"
        )
