"""A sequence's blocks in layers that see a window: those that its newest tokens still read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class WindowTable:
    """Blocks of the logical blocks `first` onwards; those before are given back, or were never needed."""

    first: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Return the logical block after the last one."""
        return self.first + len(self.blocks)

    def block(self, logical: int) -> int:
        """Return the block of logical block `logical`, which is none of those given back."""
        assert logical >= self.first, f"logical block {logical} was given back"
        return self.blocks[logical - self.first]
