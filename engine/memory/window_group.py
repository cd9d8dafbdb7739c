"""A cache group of layers that see a window: what it reads, and where its tables are on the device."""

from __future__ import annotations

from quire.engine.memory.move_kinds import KINDS
from quire.engine.memory.move_ring import MoveRing
from quire.engine.memory.prefix_cache import PrefixCache


class WindowGroup:
    """Layers that keep the last `window` tokens.

    first_table: where the device has the table of row 0; those of the others follow.
    """

    def __init__(
        self, number: int, window: int, block_size: int, stride: int, num_blocks: int, ring: MoveRing
    ) -> None:
        self.window = window
        self.mark = KINDS * number  # of its moves
        self.cache = PrefixCache(num_blocks, ring, self.mark)
        self._block_size = block_size
        self.first_table = number * stride

    def table_row(self, row: int) -> int:
        """Return where the device has the table of `row`."""
        return self.first_table + row

    def first_block(self, position: int) -> int:
        """Return the first logical block that tokens from `position` on read."""
        return max(0, position + 1 - self.window) // self._block_size

    @property
    def depth(self) -> int:
        """Return how many of a prompt's last blocks the token behind them reads."""
        return -(-(self.window - 1) // self._block_size)
