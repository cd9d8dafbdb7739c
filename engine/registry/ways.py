"""The ways to blocks that are held where no layer keeps all tokens: all blocks before them."""

from __future__ import annotations

from quire.engine.hashing import Digest, Prefix


class Ways:
    """Counts for each block who needs it: the caches that hold it, and the blocks after it that are needed.

    Layers with windows have given back a prompt's first blocks while those are held that are read behind
    them. How much of a prompt is held is looked up by bisection, so what leads there is told of all the same.
    """

    def __init__(self) -> None:
        self._needed: dict[Digest, int] = {}

    def clear(self) -> None:
        self._needed.clear()

    def add(self, prefix: Prefix) -> list[Prefix]:
        """Note that one more cache holds a block; return those that are needed from now on, parents first."""
        opened: list[Prefix] = []
        at: Prefix | None = prefix
        while at is not None:
            count = self._needed.get(at.digest, 0)
            self._needed[at.digest] = count + 1
            if count:
                break
            opened.append(at)
            at = at.previous
        return opened[::-1]

    def remove(self, prefix: Prefix) -> list[Prefix]:
        """Note that one cache less holds it; return those that are no longer needed, children first."""
        closed: list[Prefix] = []
        at: Prefix | None = prefix
        while at is not None:
            self._needed[at.digest] -= 1
            if self._needed[at.digest]:
                break
            del self._needed[at.digest]
            closed.append(at)
            at = at.previous
        return closed
