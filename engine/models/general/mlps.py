"""MLPs of a model that are what kernels here compute: found by names, and proved by their numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from quire.engine.models.general.kept_linear import like_of
from quire.engine.models.general.proof import ROWS, alike, called, linears, merged, noise
from quire.kernels.linear.linear import Matrix
from quire.kernels.linear.operations import AnyLinear
from quire.kernels.pointwise.activation import ACTIVATIONS, UNGATED, Activation, UngatedActivation

Name = TypeVar("Name", bound=str)
_LARGE = 100.0  # of a gate: more than any limit that models have, and its square is within fp16
GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",), ("w1", "w3"))
_DOWN = ("down_proj", "w2")
_UNGATED = (
    ("c_fc", "c_proj"), ("fc1", "fc2"), ("fc_in", "fc_out"), ("up_proj", "down_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
)  # fmt: skip
_ACTIVATION = ("act_fn", "activation_fn", "act", "gelu_impl")


@dataclass(frozen=True, slots=True)
class Gated:
    """down(activation(gate) · up)."""

    gate_up: AnyLinear
    down: AnyLinear
    activation: Activation


def gated_of(module: nn.Module) -> Gated | None:
    """Return the gated MLP that a module is. Its gate and up projection are one matrix then."""
    into, down = linears(module, GATE_UP), linears(module, [(name,) for name in _DOWN])
    activation = _activation_of(module, ACTIVATIONS)
    if activation is None and not _has_function(module):
        activation = "silu"  # which code may call by its name (LFM2); numbers tell
    if into is None or down is None or activation is None:
        return None
    gated = Gated(merged(into), merged(down), activation)
    if 2 * gated.down.weight.shape[1] != gated.gate_up.weight.shape[0]:
        return None
    x = noise(ROWS, into[0].in_features, like_of(into[0]))
    largest = gated.gate_up(x).abs().max().float().clamp(min=1e-2)
    for each in (x, x * (_LARGE / largest).to(x.dtype)):  # large ones show what limits them
        theirs = called(module, each)
        gate, up = gated.gate_up(each).chunk(2, dim=-1)
        ours = gated.down(ACTIVATIONS[activation](gate) * up)
        if theirs is None or not alike(ours, theirs):
            return None
    return gated


@dataclass(frozen=True, slots=True)
class Ungated:
    """down(activation(up)), and what the module is given besides, which it adds, if `adds`."""

    up: AnyLinear
    down: AnyLinear
    activation: UngatedActivation
    adds: bool

    @property
    def matrices(self) -> tuple[Matrix, Matrix]:
        return self.up.matrix, self.down.matrix


def _each(module: nn.Module, names: Sequence[str]) -> list[list[nn.Linear] | None]:
    return [linears(module, [(name,)]) for name in names]


def ungated_of(module: nn.Module) -> Ungated | None:
    """Return the MLP of two products that a module is."""
    found = next((parts for names in _UNGATED if all(parts := _each(module, names))), None)
    activation = _activation_of(module, UNGATED)
    if found is None or activation is None:
        return None
    products = [part for part in found if part is not None]
    up, down = map(merged, products)
    if down.weight.shape[1] != up.weight.shape[0]:  # what is between them is more than an activation
        return None
    x = noise(ROWS, up.weight.shape[1], like_of(products[0][0]))
    residual = noise(ROWS, down.weight.shape[0], x)
    largest = up(x).abs().max().float().clamp(min=1e-2)
    adds = called(module, x) is None
    for each in (x, x * (_LARGE / largest).to(x.dtype)):  # large ones show what limits them
        ours = down(UNGATED[activation](up(each)))
        theirs = called(module, each, residual) if adds else called(module, each)
        if theirs is None or not alike(ours + residual if adds else ours, theirs):
            return None
    return Ungated(up, down, activation, adds)


def _has_function(module: nn.Module) -> bool:
    """Return whether a module has its activation by one of the names of these."""
    return any(callable(getattr(module, name, None)) for name in _ACTIVATION)


def _activation_of(module: nn.Module, among: Mapping[Name, Callable[[Tensor], Tensor]]) -> Name | None:
    function: Callable[[Tensor], Tensor] | None = next(
        (getattr(module, name) for name in _ACTIVATION if callable(getattr(module, name, None))), None
    )
    if function is None:
        return None
    x = torch.linspace(-6, 6, 997)
    try:
        theirs = function(x)
    except Exception:  # it may want anything
        return None
    for name, ours in among.items():
        if isinstance(theirs, Tensor) and torch.allclose(ours(x), theirs, rtol=0, atol=2e-6):
            return name
    return None
