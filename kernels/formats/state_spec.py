"""What a layer keeps of all tokens that it has seen together: states that each token changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

ALIGNMENT = 16  # bytes, of where each state begins

StateDtype = Literal["float32", "float16", "bfloat16"]
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A tensor of a layer, of a sequence as a whole.

    number: of several that a layer keeps of one kind. rolls: its last dimension has the newest tokens, for a
    convolution; else it sums up all of them. exact: in float32, whatever the model computes in.
    """

    shape: tuple[int, ...]
    dtype: StateDtype
    number: int = 0
    rolls: bool = False
    exact: bool = False

    @property
    def num_bytes(self) -> int:
        return -(-prod(self.shape) * _BYTES[self.dtype] // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class LayerStates:
    """All states of the layer that transformers' code calls by `name`."""

    name: str
    parts: tuple[StateSpec, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def computed_in(self, dtype: StateDtype) -> LayerStates:
        """Return the states of a model that computes in a dtype."""
        parts = (part if part.exact else replace(part, dtype=dtype) for part in self.parts)
        return replace(self, parts=tuple(parts))
