"""PrefixBundles: which rows of a decode begin with the same blocks, so that these are read once for all."""

from __future__ import annotations

import numpy as np

from quire.engine.arrays import Int32, empty_int32
from quire.kernels.attention.cascade import SHORTEST

SMALLEST_BUNDLE = 4  # rows: for fewer the device's cache does as well
FEWEST_ROWS = 16  # in bundles: for fewer, an extra kernel in every layer costs more than it saves


class PrefixBundles:
    """Knows one block of each row's table, the one in which the shortest prefix worth sharing ends.

    Rows that name the same block there very likely begin alike up to it; how long they go on alike, the
    device finds in their tables (`quire.kernels.attention.cascade.shared_lens`), which also sees it if they
    do not.
    """

    def __init__(self, rows: int, block_size: int, width: int) -> None:
        """Of so many device rows; `width` of them fit in a bundle."""
        self.width = width
        self._column = (SHORTEST.value - 1) // block_size
        self._least_context = SHORTEST.value + 1  # the block of the newest token is never shared
        self._blocks = np.zeros(rows, np.int32)
        self._found_for: Int32 | None = None
        self._found = (empty_int32(), empty_int32())

    def note(self, rows: Int32, columns: Int32, blocks: Int32) -> None:
        """Table entries that a step changes, each step's."""
        here = columns == self._column
        if here.any():
            self._blocks[rows[here]] = blocks[here]

    def of(self, rows: Int32, context_lens: Int32) -> tuple[Int32, Int32]:
        """Of a decode step's B rows, as SharedPrefixes has them: members, flat, and the bundle of each row.

        Both are empty where hardly anything is shared.
        """
        blocks = np.where(context_lens >= self._least_context, self._blocks[rows], -1)
        if self._found_for is not None and np.array_equal(blocks, self._found_for):
            return self._found
        self._found_for = blocks
        self._found = self._find(blocks)
        return self._found

    def _find(self, blocks: Int32) -> tuple[Int32, Int32]:
        order = np.argsort(blocks, kind="stable").astype(np.int32)
        ranked = blocks[order]
        alike = np.empty(len(order), bool)
        alike[:1] = False
        alike[1:] = (ranked[1:] == ranked[:-1]) & (ranked[1:] >= 0)
        index = np.arange(len(order))
        lane = (index - np.maximum.accumulate(np.where(alike, 0, index))) % self.width
        first = lane == 0
        bundle = np.cumsum(first) - 1
        shares = np.bincount(bundle)[bundle] >= SMALLEST_BUNDLE
        if np.count_nonzero(shares) < FEWEST_ROWS:
            return empty_int32(), empty_int32()
        bundle = np.cumsum(first & shares) - 1
        members = np.full((bundle[-1] + 1, self.width), -1, np.int32)
        members[bundle[shares], lane[shares]] = order[shares]
        bundle_of = np.full(len(order), -1, np.int32)
        bundle_of[order[shares]] = bundle[shares]
        return members.ravel(), bundle_of
