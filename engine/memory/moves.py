"""Moves of blocks, gathered for the next plan: table entries, copies, transfers between the tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from quire.engine.memory.pool import BlockPool
from quire.engine.memory.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Transfer:
    """One block on its way; both ends are held until it is there."""

    device: int
    host: int


class Moves(msgspec.Struct):
    """The next plan's changes of blocks, kept row by row, so that they can be undone."""

    entries: dict[tuple[int, int], int] = {}  # (row, logical block) -> block
    copies: dict[int, tuple[int, int]] = {}  # row -> source, destination
    swap_out: list[Transfer] = []  # these two are never undone
    swap_in: list[Transfer] = []
    written: set[int] = set()  # blocks that the step fills with prompts
    spills: list[Transfer] = []  # swapped out too; the device's copy stays cached

    def enter(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """Have the table of `row` name `blocks` from logical block `first` on."""
        for logical, block in enumerate(blocks, first):
            self.entries[row, logical] = block

    def leave(self, row: int, first: int, end: int) -> None:
        """Drop the entries first..end-1 of the table of `row`."""
        if self.entries:
            for logical in range(first, end):
                self.entries.pop((row, logical), None)

    def undo_copy(self, row: int, pool: BlockPool) -> None:
        """Make no copy for the table of `row`."""
        copy = self.copies.pop(row, None)
        if copy is not None:
            pool.unhold(copy[0])

    def release(self, blocks: Sequence[int], pool: BlockPool, cache: PrefixCache) -> None:
        """Give a table's `blocks` back, last first: of those cached, children are evicted before parents.

        Those that are computing, and that no table names any more, are forgotten.
        """
        pool.release(*reversed(blocks))
        if not cache.computing:
            return
        for block in cache.computing.intersection(blocks):
            if not pool.count(block):
                cache.forget(block)
                self.written.discard(block)

    @property
    def transfers(self) -> list[Transfer]:
        return [*self.swap_out, *self.swap_in, *self.spills]

    @property
    def has_transfers(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.spills)
