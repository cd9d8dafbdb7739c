"""Moves of blocks, gathered for the next plan: table entries, copies, transfers between the tiers."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


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

    def leave(self, row: int, num_blocks: int) -> None:
        """Drop the entries of the table of `row`, which has so many blocks."""
        for logical in range(num_blocks if self.entries else 0):
            self.entries.pop((row, logical), None)

    @property
    def transfers(self) -> list[Transfer]:
        return [*self.swap_out, *self.swap_in, *self.spills]

    @property
    def has_transfers(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.spills)
