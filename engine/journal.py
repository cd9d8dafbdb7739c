"""What the prefix caches can find, told in order by the engine's thread to another one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from engine.prefix_cache import Digest, PrefixCache

MAX_CHANGES = 1 << 15


class Journal:
    """Follows the caches of all tiers. The engine's thread only ever appends to a bounded queue.

    The other methods are for one other thread. To it a digest is findable as long as any tier has it.
    """

    def __init__(self, tiers: Sequence[PrefixCache], max_changes: int = MAX_CHANGES) -> None:
        self.dropped = 0  # changes that found the queue full, since start
        self.overflown = False
        self._tiers = tiers
        self._found: list[set[Digest]] = [set() for _ in tiers]
        self._changes: deque[tuple[int, Digest, bool]] = deque()
        self._max_changes = max_changes
        for number, tier in enumerate(tiers):
            tier.on_change = partial(self._note, number)

    def _note(self, tier: int, digest: Digest, findable: bool) -> None:
        if len(self._changes) < self._max_changes:
            self._changes.append((tier, digest, findable))
        else:
            self.dropped += 1
            self.overflown = True

    def __len__(self) -> int:
        return len(self._changes)

    def take(self, count: int) -> dict[Digest, bool]:
        """The net effect of the next changes, of as many as touch at most `count` digests."""
        net: dict[Digest, bool] = {}
        while self._changes and len(net) < count:
            tier, digest, findable = self._changes.popleft()
            before = self._findable(digest)
            if findable:
                self._found[tier].add(digest)
            else:
                self._found[tier].discard(digest)
            if self._findable(digest) != before and net.pop(digest, None) is None:
                net[digest] = not before
        return net

    def restart(self) -> list[Digest]:
        """Everything that is findable now; `take` goes on from there.

        What changes meanwhile may be in both, which does no harm: a tier holds a digest or does not.
        """
        self.overflown = False
        self._changes.clear()
        lists = [tier.digests() for tier in self._tiers]
        self._found = [set(digests) for digests in lists]
        return list(dict.fromkeys(digest for digests in lists for digest in digests))

    def _findable(self, digest: Digest) -> bool:
        return any(digest in found for found in self._found)
