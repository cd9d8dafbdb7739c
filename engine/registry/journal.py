"""The journal of findable blocks, told in order by the engine's thread to another one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

from quire.engine.hashing import Digest, Prefix
from quire.engine.memory.manager import BlockManager
from quire.engine.memory.prefix_cache import PrefixCache
from quire.engine.registry.ways import Ways
from quire.engine.registry.window_ends import WindowCaches, WindowEnds

MAX_CHANGES = 1 << 15


class Journal:
    """Follows the caches of all tiers. The engine's thread only ever appends to a bounded queue.

    The other methods are for one other thread. They tell of what is reachable: a block of any tier whose
    prompt's earlier blocks are all in some tier, too. A tier may forget a block before those that follow it.

    With window groups a reachable block goes by another name while a sequence cannot go on behind it. Where
    no layer keeps all tokens, the blocks that lead to one that is held count as reachable.
    """

    def __init__(
        self,
        tiers: Sequence[PrefixCache],
        max_changes: int = MAX_CHANGES,
        windows: Sequence[WindowCaches] = (),
    ) -> None:
        """tiers: of the layers that keep all tokens; none if no layer does."""
        self.dropped = 0  # changes that found the queue full, since start
        self.overflown = False
        self._tiers = tiers
        self._ends = WindowEnds(windows) if windows else None
        self._ways = Ways()
        # A group's number is None for layers that keep all tokens.
        self._sources: list[tuple[PrefixCache, int | None, int]] = [
            *((cache, None, tier) for tier, cache in enumerate(tiers)),
            *(
                (cache, group, tier)
                for group, each in enumerate(windows)
                for tier, cache in enumerate(each.tiers)
            ),
        ]
        self._changes: deque[tuple[int, Prefix, bool]] = deque()
        self._max_changes = max_changes
        self._forget()
        for number, (cache, _, _) in enumerate(self._sources):
            cache.listeners.append(partial(self._note, number))

    def _note(self, source: int, prefix: Prefix, findable: bool) -> None:
        if len(self._changes) < self._max_changes:
            self._changes.append((source, prefix, findable))
        else:
            self.dropped += 1
            self.overflown = True

    def __len__(self) -> int:
        return len(self._changes)

    def take(self, count: int) -> dict[Digest, bool]:
        """Take the net effect of the next `count` changes, if there are so many: what is there or no more."""
        net: dict[Digest, bool] = {}
        for _ in range(min(count, len(self._changes))):
            for digest, reachable in self._apply(*self._changes.popleft()):
                if net.pop(digest, None) is None:
                    net[digest] = reachable
        return net if self._ends is None else self._ends.settle(net, self._children)

    def restart(self) -> list[Digest]:
        """Return everything that is there now, parents first; `take` goes on from there.

        What changes meanwhile may be in both, which does no harm: a tier holds a prefix or does not.
        """
        self.overflown = False
        self._changes.clear()
        self._forget()
        found: list[Digest] = []
        for number, (cache, _, _) in enumerate(self._sources):
            for prefix in cache.prefixes():
                found += (digest for digest, _ in self._apply(number, prefix, True))
        if self._ends is None:
            return found
        return list(self._ends.settle(dict.fromkeys(found, True), self._children))

    def _forget(self) -> None:
        if self._ends is not None:
            self._ends.clear()
        self._ways.clear()
        self._held: list[set[Digest]] = [set() for _ in self._tiers]
        self._children: dict[Digest | None, set[Digest]] = {}  # of those that any tier holds
        self._reachable: set[Digest] = set()

    def _apply(self, source: int, prefix: Prefix, findable: bool) -> Iterable[tuple[Digest, bool]]:
        """Return what becomes reachable, parents first, or is no more, children first."""
        digest, parent = prefix.digest, prefix.parent
        _, group, tier = self._sources[source]
        if group is not None:
            assert self._ends is not None
            is_new = self._ends.note(group, tier, digest, findable)
            return self._lead(self._ends, prefix, findable) if is_new and not self._tiers else []
        before = any(digest in held for held in self._held)
        if findable:
            self._held[tier].add(digest)
        else:
            self._held[tier].discard(digest)
        if before == any(digest in held for held in self._held):
            return []
        siblings = self._children.setdefault(parent, set())
        if findable:
            siblings.add(digest)
            if self._ends is not None:
                self._ends.follow(digest, parent)
            if parent is not None and parent not in self._reachable:
                return []
            opened = self._family(digest)
            self._reachable.update(opened)
            return [(each, True) for each in opened]
        siblings.discard(digest)
        if self._ends is not None:
            self._ends.leave(digest)
        if not siblings:
            del self._children[parent]
        if digest not in self._reachable:
            return []
        closed = self._family(digest)
        self._reachable.difference_update(closed)
        return [(each, False) for each in reversed(closed)]

    def _lead(self, ends: WindowEnds, prefix: Prefix, findable: bool) -> Iterable[tuple[Digest, bool]]:
        """Return the same where no layer keeps all tokens, and one more cache holds `prefix`, or one less."""
        changed = self._ways.add(prefix) if findable else self._ways.remove(prefix)
        for each in changed:
            if findable:
                self._children.setdefault(each.parent, set()).add(each.digest)
                ends.follow(each.digest, each.parent)
            else:
                self._children[each.parent].discard(each.digest)
                if not self._children[each.parent]:
                    del self._children[each.parent]
                ends.leave(each.digest)
        return [(each.digest, findable) for each in changed]

    def _family(self, digest: Digest) -> list[Digest]:
        """It and all that follow it, parents first."""
        family = [digest]
        for each in family:
            family.extend(self._children.get(each, ()))
        return family


def journal_of(blocks: BlockManager, max_changes: int = MAX_CHANGES) -> Journal:
    """Return one that follows all caches of `blocks` from now on."""
    windows: list[WindowCaches] = []
    if blocks.windows is not None:
        tiers = list(zip(blocks.caches, blocks.host.caches, strict=True))[-len(blocks.windows) :]
        windows = [
            WindowCaches(caches, depth) for caches, depth in zip(tiers, blocks.windows.depths, strict=True)
        ]
    full = [] if blocks.full is None else [blocks.cache, blocks.host.cache]
    return Journal(full, max_changes, windows)
