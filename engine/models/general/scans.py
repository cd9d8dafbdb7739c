"""Mixers of Mamba and of Mamba 2 by kernels alone, with what they compute of their weights computed once.

Their own code takes the exponential of a weight for every token, and turns tokens into columns and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.models.general.gated_norms import gated_norm_of
from quire.engine.models.general.norms import norm_of
from quire.engine.models.general.proof import alike, called, noise, unbiased
from quire.engine.models.general.stateful import Called
from quire.kernels.backend import Backend
from quire.kernels.pointwise.norm import Norm, rms_norm_reference
from quire.kernels.recurrence.operations import Recurrences
from quire.kernels.recurrence.step import StateStep

_SCAN = {"conv1d", "act", "in_proj", "x_proj", "dt_proj", "out_proj"}
_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")
_STATE_SPACE = {"conv1d", "act", "in_proj", "norm", "out_proj"}
Found = Callable[[], tuple[StateStep, Sequence[Tensor]] | None]


def is_scan(module: nn.Module) -> bool:
    """Return whether a module has the parts of Mamba's mixer, maybe with norms, and no others."""
    parts, weights = _parts_of(module)
    return parts in (_SCAN, _SCAN | {*_NORMS}) and weights == {"A_log", "D"}


def is_state_space(module: nn.Module) -> bool:
    """Return whether a module has the parts of Mamba 2's mixer, and no others."""
    parts, weights = _parts_of(module)
    return parts == _STATE_SPACE and weights == {"A_log", "D", "dt_bias"}


def _parts_of(module: nn.Module) -> tuple[set[str], set[str]]:
    parts = {name for name, _ in module.named_children()}
    return parts, {name for name, _ in module.named_parameters(recurse=False)}


class _Mixer:
    """Takes the place of a mixer's `forward`. step: the step's tokens, and the module's states."""

    def __init__(self, backend: Backend, module: nn.Module, step: Found) -> None:
        parts: Any = module
        assert backend.recurrences is not None
        self._module, self._backend, self._step = parts, backend, step
        self._recurrences: Recurrences = backend.recurrences
        self._named = Called(module).named
        silu = parts.activation is not None
        self._convolution = parts.conv1d.weight.squeeze(1), parts.conv1d.bias, silu
        self._rates = -torch.exp(parts.A_log.float())

    def __call__(self, *args: Any, **given: Any) -> Any:
        of_step = self._step()
        assert of_step is not None
        hidden = self._named(args, given)["hidden_states"]
        return self._module.out_proj(self._mixed(self._module.in_proj(hidden)[0], *of_step)[None])

    def _mixed(self, projected: Tensor, step: StateStep, states: Sequence[Tensor]) -> Tensor:
        """Return what the output's projection takes [T, …] of what the first one gives [T, …]."""
        raise NotImplementedError


class StateSpaceModule(_Mixer):
    """In place of the `forward` of a module that `is_state_space`, and whose states are known."""

    def __init__(self, backend: Backend, module: nn.Module, step: Found) -> None:
        super().__init__(backend, module, step)
        norm = gated_norm_of(self._module.norm)
        if norm is None:
            raise ValueError("its norm is none that is known")
        self._norm = norm

    def _mixed(self, projected: Tensor, step: StateStep, states: Sequence[Tensor]) -> Tensor:
        module, recurrences, (newest, summed) = self._module, self._recurrences, states
        heads, rows, columns = summed.shape[1:]
        inner, channels = heads * rows, newest.shape[1]
        shared = (channels - inner) // 2
        gate, mixed, steps = projected.split([inner, channels, heads], dim=1)
        mixed = recurrences.convolve(mixed, *self._convolution, newest, step)
        x, b, c = mixed.split([inner, shared, shared], dim=1)
        x, b, c = x.unflatten(1, (heads, rows)), b.unflatten(1, (-1, columns)), c.unflatten(1, (-1, columns))
        weights = module.D, module.dt_bias, module.time_step_limit
        seen = recurrences.state_space_scan(x, steps, self._rates, b, c, *weights, summed, step)
        return self._backend.gated_norm(seen.flatten(1), gate, self._norm, gate.dtype)


class ScanModule(_Mixer):
    """In place of the `forward` of a module that `is_scan`, and whose states are known."""

    def __init__(self, backend: Backend, module: nn.Module, step: Found) -> None:
        super().__init__(backend, module, step)
        parts = self._module
        bias = parts.dt_proj.bias
        self._weights = parts.D.float(), None if bias is None else bias.float()
        self._steps = unbiased(parts.dt_proj)
        columns = parts.A_log.shape[1]
        self._widths = [parts.x_proj.out_features - 2 * columns, columns, columns]
        self._norms: list[Norm] = []
        if hasattr(module, _NORMS[0]):
            named = zip(_NORMS, self._widths, strict=True)
            self._norms = [_norm_of(getattr(module, name), width, parts.D) for name, width in named]

    def _mixed(self, projected: Tensor, step: StateStep, states: Sequence[Tensor]) -> Tensor:
        backend, (newest, summed), (skip, bias) = self._backend, states, self._weights
        x, gate = projected.chunk(2, dim=1)
        x = self._recurrences.convolve(x, *self._convolution, newest, step)
        steps, b, c = self._module.x_proj(x).split(self._widths, dim=1)
        if self._norms:
            pairs = zip((steps, b, c), self._norms, strict=True)
            steps, b, c = (backend.rms_norm(each, norm.weight, norm.eps) for each, norm in pairs)
        steps = backend.linear(steps, self._steps)
        given = (x, steps, self._rates, b, c, skip, gate, bias, True)
        return self._recurrences.selective_scan(*given, summed, step)


def _norm_of(module: Any, width: int, like: Tensor) -> Norm:
    """Return the norm that a module is, which may have no weight (Falcon-Mamba). Raises ValueError."""
    found = norm_of(module)
    if found is not None:
        return found
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    x = noise(4, width, like)
    theirs = called(module, x)
    if isinstance(eps, float) and theirs is not None:
        norm = Norm(torch.ones(width, dtype=like.dtype, device=like.device), eps)
        if alike(rms_norm_reference(x, norm.weight, eps), theirs):
            return norm
    raise ValueError("its norms are none that are known")
