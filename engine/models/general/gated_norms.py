"""Norms with a gate of a model that are what kernels here compute: found by parameters, proved by numbers."""

from __future__ import annotations

import inspect
from itertools import product
from typing import get_args

import torch
from torch import Tensor, nn

from quire.engine.models.general.proof import ROWS, TOLERANCE, alike, called, noise
from quire.kernels.backend import Backend
from quire.kernels.pointwise.gated_norm import GateActivation, GatedNorm, gated_norm_reference

_TAKEN = ["hidden_states", "gate"]  # by a module that is one, and by `GatedNormModule`
_GROUPS = ("n_groups", "group_size")  # by which name a module has how many there are, or of how many columns


def gated_norm_of(module: nn.Module) -> GatedNorm | None:
    """Return the RMSNorm with a gate that a module is, which takes what is normalised, and the gate."""
    named = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if [*named] != ["weight"] or not isinstance(eps, float):
        return None
    weight = named["weight"]
    if weight.dim() != 1 or weight.dtype not in TOLERANCE:
        return None
    if [*inspect.signature(module.forward).parameters] != _TAKEN:  # what else there is could change it
        return None
    # Small ones show the epsilon.
    sizes = torch.tensor([[1e-3], [1e-2], [1.0], [30.0]], device=weight.device)
    x = (sizes * (noise(ROWS, len(weight), weight).float() + 0.5)).to(weight.dtype)
    gate = noise(ROWS, len(weight) + 1, weight)[:, 1:]  # other noise
    theirs = called(module, x, gate)
    if theirs is None:
        return None
    count, columns = (getattr(module, name, None) for name in _GROUPS)
    groups = count if isinstance(count, int) else len(weight) // columns if isinstance(columns, int) else 1
    for activation, gate_first in product(get_args(GateActivation), (False, True)):
        norm = GatedNorm(weight.data, eps, groups, activation, gate_first)
        if len(weight) % groups == 0 and alike(gated_norm_reference(x, gate, norm), theirs):
            return norm
    return None


class GatedNormModule:
    """x [..., H] and a gate [..., H] -> [..., H]."""

    def __init__(self, norm: GatedNorm, backend: Backend) -> None:
        self._norm, self._gated_norm = norm, backend.gated_norm

    def __call__(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        rows, gates = (each.reshape(-1, hidden_states.shape[-1]) for each in (hidden_states, gate))
        return self._gated_norm(rows, gates, self._norm).view(hidden_states.shape)
