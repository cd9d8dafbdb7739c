"""What was found of a prefix in a cache group of window layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowBlocks:
    """Blocks of the logical blocks `first` onwards, all that is read behind the prefix.

    on_host: the logical blocks of which they are blocks in host memory.
    """

    first: int
    blocks: Sequence[int]
    on_host: frozenset[int] = frozenset()

    @property
    def end(self) -> int:
        """Return the logical block after the last one."""
        return self.first + len(self.blocks)

    @property
    def device(self) -> list[int]:
        """Return those on the device."""
        return [block for at, block in enumerate(self.blocks, self.first) if at not in self.on_host]

    @property
    def host(self) -> list[int]:
        """Return those in host memory."""
        return [block for at, block in enumerate(self.blocks, self.first) if at in self.on_host]
