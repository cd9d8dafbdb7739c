"""What happens to blocks besides being computed, gathered for the next plan."""

from __future__ import annotations

import msgspec

from engine.host_tier import Transfer


class Moves(msgspec.Struct):
    """What the next plan must tell the device about blocks, row by row, so that it can be undone."""

    entries: dict[tuple[int, int], int] = {}  # (row, logical block) -> block
    copies: list[tuple[int, int, int]] = []  # (row, source, destination)
    swap_out: list[Transfer] = []  # these two are never undone
    swap_in: list[Transfer] = []
    written: set[int] = set()  # blocks that the step fills with prompts
    spills: list[Transfer] = []  # swapped out too; the device's copy stays cached

    @property
    def has_transfers(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.spills)
