"""The weights of a layer's experts, and what they do between their products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from quire.kernels.pointwise.activation import Activation

Limited: TypeAlias = Literal["clamped", "limited"]


@dataclass(frozen=True, slots=True)
class Experts:
    """E gated MLPs: down(activation(gate) · up).

    gate_up [E, 2I, H] and down [E, H, I] may be strided, but not along their last dimension; gate_up_bias
    [E, 2I] and down_bias [E, H] are both there or both None. interleaved: rows of gate and up take turns,
    else the gate's come first. clamped is (up + 1) · gate · sigmoid(alpha · gate), both within `limit`, as in
    gpt-oss; limited is silu(gate) · up within it, as in HY 4.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    interleaved: bool = False
    activation: Activation | Limited = "silu"
    alpha: float = 0.0
    limit: float = 0.0

    @property
    def count(self) -> int:
        return self.gate_up.shape[0]

    @property
    def hidden(self) -> int:
        return self.gate_up.shape[2]

    @property
    def inner(self) -> int:
        return self.down.shape[2]
