"""What was found of a prefix in a cache group of window layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowBlocks:
    """Blocks of the logical blocks `first` onwards, all that is read behind the prefix."""

    first: int
    blocks: Sequence[int]
