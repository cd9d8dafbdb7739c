"""What happens to blocks besides being computed, gathered for the next plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.host_tier import Transfer


@dataclass(slots=True)
class Moves:
    """What the next plan must tell the device about blocks, row by row, so that it can be undone."""

    entries: dict[tuple[int, int], int] = field(default_factory=dict)  # (row, logical block) -> block
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # (row, source, destination)
    swap_out: list[Transfer] = field(default_factory=list)  # these two are never undone
    swap_in: list[Transfer] = field(default_factory=list)
    written: set[int] = field(default_factory=set)  # blocks that the step fills with prompts
    spills: list[Transfer] = field(default_factory=list)  # swapped out too; the device's copy stays cached

    @property
    def has_transfers(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.spills)
