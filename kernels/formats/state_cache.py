"""The states of all layers that keep some, as models take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateCache:
    """layers: of each its states in all blocks, [num_blocks + 1, …] each, of which the last is nobody's.

    A block has the states of a sequence as they are behind the newest of its `block_size` tokens there.
    """

    layers: Sequence[Sequence[Tensor]]
    block_size: int

    @property
    def spare(self) -> int:
        """Return the block of rows that pad."""
        return len(self.layers[0][0]) - 1
