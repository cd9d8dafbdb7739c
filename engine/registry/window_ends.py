"""Behind which of a prompt's blocks a sequence can go on, where some layers keep the last tokens only."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from quire.engine.hashing import Digest
from quire.engine.memory.prefix_cache import PrefixCache

Runs = tuple[int, ...]  # of each group: how many blocks in a row it holds, up to some block


@dataclass(frozen=True, slots=True)
class WindowCaches:
    """The caches of a window group, a tier each, and how many of the last blocks are read there."""

    tiers: Sequence[PrefixCache]
    depth: int


def behind_window(digest: Digest) -> Digest:
    """Return what stands for a reachable block behind which no sequence can go on: a window is gone there."""
    return digest[::-1]


class WindowEnds:
    """Counts how many blocks in a row each group holds up to each reachable block, as many as are read.

    Where all groups hold as many, a sequence can go on. A change counts from its block on, as far as a window
    reaches; so changes are gathered, and what follows them is looked at once.
    """

    def __init__(self, groups: Sequence[WindowCaches]) -> None:
        self._groups = groups
        self._enough: Runs = tuple(group.depth for group in groups)
        self.clear()

    def clear(self) -> None:
        self._held: list[list[set[Digest]]] = [[set() for _ in group.tiers] for group in self._groups]
        self._parents: dict[Digest, Digest | None] = {}
        self._runs: dict[Digest, Runs] = {}  # of those that are reachable
        self._changed: dict[Digest, None] = {}  # since they were looked at, in this order

    def note(self, group: int, tier: int, digest: Digest, findable: bool) -> bool:
        """Note that a tier of a group holds this block now, or no more; return whether that is new."""
        held = self._held[group][tier]
        self._changed[digest] = None
        if findable == (digest in held):
            return False
        if findable:
            held.add(digest)
        else:
            held.discard(digest)
        return True

    def follow(self, digest: Digest, parent: Digest | None) -> None:
        """Note that a block is there after `parent`, of layers that keep all tokens or before one held."""
        self._parents[digest] = parent

    def leave(self, digest: Digest) -> None:
        """It is there no more."""
        del self._parents[digest]

    def settle(
        self, reachable: Mapping[Digest, bool], children: Mapping[Digest | None, Collection[Digest]]
    ) -> dict[Digest, bool]:
        """Return which names come and go: of a block its digest, or, behind a lost window, the other one.

        reachable: the blocks that became reachable, parents first, or are no more. children: of each block.
        """
        told: dict[Digest, bool] = {}
        before: dict[Digest, Runs | None] = {}  # of those whose runs change
        for digest, opened in reachable.items():
            if opened:
                self._changed[digest] = None
            else:
                told[self._name(digest, self._runs.pop(digest))] = False
        waiting = deque(self._changed)
        self._changed.clear()
        while waiting:
            digest = waiting.popleft()
            runs = self._count(digest)
            # Without runs it is not reachable, or its parent is yet to be looked at, and leads back to it.
            if runs is not None and runs != self._runs.get(digest):
                before.setdefault(digest, self._runs.get(digest))
                self._runs[digest] = runs
                waiting.extend(children.get(digest, ()))
        for digest, old in before.items():
            name = self._name(digest, self._runs[digest])
            if old is not None:
                if name == self._name(digest, old):
                    continue
                told[self._name(digest, old)] = False
            told[name] = True
        return told

    def _name(self, digest: Digest, runs: Runs) -> Digest:
        return digest if runs == self._enough else behind_window(digest)

    def _count(self, digest: Digest) -> Runs | None:
        if digest not in self._parents:
            return None
        parent = self._parents[digest]
        before = self._enough if parent is None else self._runs.get(parent)
        if before is None:
            return None
        return tuple(
            min(enough, run + 1) if any(digest in tier for tier in held) else 0
            for held, run, enough in zip(self._held, before, self._enough, strict=True)
        )
