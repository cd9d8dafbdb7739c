"""A part of a model that counts what it is given."""

from __future__ import annotations

from torch import Tensor

from quire.engine.models.layers import LayerNorm
from quire.kernels.linear.linear import Linear


class Watched:
    """Notes of how many tokens a part of a layer is computed."""

    def __init__(self, part: Linear | LayerNorm) -> None:
        self.part = part
        self.counts: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.counts.append(len(x))
        return self.part(x)
