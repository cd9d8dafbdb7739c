"""The blocks of one memory tier: ids, reference counts and the free list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class OutOfBlocks(Exception):
    """No free block is left; the caller must free some first."""


class BlockPool:
    """Hands out block ids 0..num_blocks-1 and counts who refers to each (PagedAttention, section 4.2).

    A block is free exactly when its count is 0. Nothing here knows what a block holds.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.references = 0  # sum of all counts
        self.allocations = 0  # since start
        self._counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest ids go first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_active(self) -> int:
        return self.num_blocks - len(self._free)

    def count(self, block: int) -> int:
        return self._counts[block]

    def allocate(self) -> int:
        """A block with one reference. Raises OutOfBlocks."""
        if not self._free:
            raise OutOfBlocks
        block = self._free.pop()
        self._counts[block] = 1
        self.references += 1
        self.allocations += 1
        return block

    def share(self, block: int) -> None:
        assert self._counts[block] > 0, f"block {block} is free and cannot be shared"
        self._counts[block] += 1
        self.references += 1

    def release(self, block: int) -> None:
        assert self._counts[block] > 0, f"block {block} is released more often than it was taken"
        self._counts[block] -= 1
        self.references -= 1
        if self._counts[block] == 0:
            self._free.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert every invariant, given all block tables that exist. O(blocks)."""
        expected = Counter(block for table in tables for block in table)
        for block, count in enumerate(self._counts):
            assert count == expected[block], (
                f"block {block} has count {count}, but {expected[block]} tables name it"
            )
        free = set(self._free)
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert free == {block for block, count in enumerate(self._counts) if count == 0}
        assert self.references == sum(self._counts)
