"""Cascades: rows of a decode that begin with the same blocks, which attention reads once for all of them."""

from __future__ import annotations

import numpy as np

from quire.engine.arrays import Int32, empty_int32
from quire.kernels.attention.cascade import SHORTEST

SMALLEST_CASCADE = 4  # rows: for fewer the device's cache does as well
FEWEST_ROWS = 16  # in cascades: for fewer, an extra kernel in every layer costs more than it saves


class Cascades:
    """Finds rows that share a prefix.

    It knows one block of each row's table, the one in which the shortest prefix worth sharing ends. Rows
    that name the same block there very likely begin alike up to it; how long they go on alike, the device
    finds in their tables (`quire.kernels.attention.cascade.shared_lens`), which also sees it if they do not.
    """

    def __init__(self, rows: int, block_size: int, width: int) -> None:
        """`rows`: how many the device has; `width` of them fit in a cascade."""
        self.width = width
        self._column = (SHORTEST.value - 1) // block_size
        self._least_context = SHORTEST.value + 1  # the block of the newest token is never shared
        self._blocks = np.zeros(rows, np.int32)
        self._found_for: Int32 | None = None
        self._found = (empty_int32(), empty_int32())

    def note(self, rows: Int32, columns: Int32, blocks: Int32) -> None:
        """Note the table entries that a step changes. Each step's must be told."""
        here = columns == self._column
        if here.any():
            self._blocks[rows[here]] = blocks[here]

    def find(self, rows: Int32, context_lens: Int32) -> tuple[Int32, Int32]:
        """Return the cascades of a decode step's rows [B]: members [N × width] and each row's cascade [B].

        They are as SharedPrefixes has them, with the members flat. Both are empty where hardly anything is
        shared.
        """
        blocks = np.where(context_lens >= self._least_context, self._blocks[rows], -1)
        if self._found_for is not None and np.array_equal(blocks, self._found_for):
            return self._found
        self._found_for = blocks
        self._found = self._group(blocks)
        return self._found

    def _group(self, blocks: Int32) -> tuple[Int32, Int32]:
        order = np.argsort(blocks, kind="stable").astype(np.int32)
        ranked = blocks[order]
        alike = np.empty(len(order), bool)
        alike[:1] = False
        alike[1:] = (ranked[1:] == ranked[:-1]) & (ranked[1:] >= 0)
        index = np.arange(len(order))
        lane = (index - np.maximum.accumulate(np.where(alike, 0, index))) % self.width
        first = lane == 0
        cascade = np.cumsum(first) - 1
        shares = np.bincount(cascade)[cascade] >= SMALLEST_CASCADE
        if np.count_nonzero(shares) < FEWEST_ROWS:
            return empty_int32(), empty_int32()
        cascade = np.cumsum(first & shares) - 1
        members = np.full((cascade[-1] + 1, self.width), -1, np.int32)
        members[cascade[shares], lane[shares]] = order[shares]
        cascade_of = np.full(len(order), -1, np.int32)
        cascade_of[order[shares]] = cascade[shares]
        return members.ravel(), cascade_of
