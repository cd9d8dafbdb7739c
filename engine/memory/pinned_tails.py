"""The last, partly filled blocks of pinned prefixes: shared, and copied on write (section 4.4)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quire.engine.arrays import Int32
from quire.engine.hashing import Prefix


@dataclass(frozen=True, slots=True)
class Tail:
    """A block that begins with some tokens, which come after the full blocks of a pinned prefix."""

    block: int
    num_tokens: int


class PinnedTails:
    """Knows which block holds the tokens that follow the full blocks of each pinned prefix.

    They have no digest: only a sequence that has all these full blocks looks for them here. Whoever shares
    such a block writes behind what it holds in common with it, so it gets a copy before that.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[Prefix | None, bytes], int] = {}  # by what is before the tokens, and these
        self._after: dict[Prefix | None, list[tuple[Int32, int]]] = {}
        self._wanted: set[tuple[Prefix | None, bytes]] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks.values()

    @property
    def num_wanted(self) -> int:
        """Return how many were asked for that nobody has computed yet."""
        return len(self._wanted)

    def want(self, before: Prefix | None, tokens: Int32) -> None:
        """Ask for a block that holds `tokens` [N], fewer than a block has, after the blocks of `before`."""
        key = before, tokens.tobytes()
        if key not in self._blocks:
            self._wanted.add(key)

    def keep(self, before: Prefix | None, tokens: Int32, block: int) -> bool:
        """Remember that `block` holds these tokens, if it was asked for; return whether it was."""
        key = before, tokens.tobytes()
        if key not in self._wanted:
            return False
        self._wanted.remove(key)
        self._blocks[key] = block
        self._after.setdefault(before, []).append((tokens.copy(), block))
        return True

    def blocks(self) -> Iterable[int]:
        return self._blocks.values()

    def find(self, before: Prefix | None, tokens: Int32) -> Tail | None:
        """Return the block after those of `before` that begins with most of `tokens` [N], if any does."""
        best = None
        for held, block in self._after.get(before, ()):
            most = min(len(held), len(tokens))
            differs = np.flatnonzero(held[:most] != tokens[:most])
            alike = int(differs[0]) if len(differs) else most
            if alike > (best.num_tokens if best is not None else 0):
                best = Tail(block, alike)
        return best
