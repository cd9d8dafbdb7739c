"""How far a prompt is found where layers see windows: up to where each cache group has what is read next."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.hashing import Digest, Prefix
from quire.engine.memory.prefix_cache import PrefixCache
from quire.engine.memory.window_blocks import WindowBlocks
from quire.engine.memory.window_group import WindowGroup


def match_windows(
    groups: Sequence[WindowGroup],
    prefixes: Sequence[Prefix],
    most: int,
    block_size: int,
    host_caches: Sequence[PrefixCache],
) -> tuple[int, tuple[WindowBlocks, ...]]:
    """Return behind how many blocks, up to `most`, a sequence can go on; and what it reads there.

    What is not on the device may be in `host_caches`, a group's each, or none.
    """
    end, at = most, 0  # at: group that is looked at
    while at < len(groups):
        device, host = groups[at].cache, host_caches[at : at + 1]
        logical = groups[at].first_block(end * block_size)  # of all that is read, most ends read this one
        while logical < end and _is_found(prefixes[logical], device, *host):
            logical += 1
        at += 1
        if logical < end:  # nothing that reads this block can be found
            end, at = logical, 0
    found = []
    for at, group in enumerate(groups):
        first = group.first_block(end * block_size)
        found.append(_blocks(prefixes[first:end], first, group.cache, *host_caches[at : at + 1]))
    return end, tuple(found)


def _is_found(prefix: Prefix, *tiers: PrefixCache) -> bool:
    return any(tier.find(prefix) is not None for tier in tiers)


def _blocks(
    prefixes: Sequence[Prefix], first: int, device: PrefixCache, host: PrefixCache | None = None
) -> WindowBlocks:
    """Return the blocks that hold these, logical blocks from `first` on: of the device where it has them."""
    blocks: list[int] = []
    on_host: list[int] = []
    for logical, prefix in enumerate(prefixes, first):
        block = device.find(prefix)
        if block is None and host is not None:
            block = host.find(prefix)
            on_host.append(logical)
        assert block is not None, "a block is lost that was found"
        blocks.append(block)
    return WindowBlocks(first, blocks, frozenset(on_host))


@dataclass(frozen=True, slots=True, eq=False)
class _Reach:
    """A sequence goes on behind `end` blocks, and from nowhere after that up to `most`."""

    end: int
    most: int
    windows: tuple[WindowBlocks, ...]
    places: list[tuple[PrefixCache, array[int]]]  # blocks of `windows`
    times_forgotten: int  # of all those, by then


class WindowMatch:
    """What `match_windows` finds of a sequence that waits, which is asked for in each step.

    What is not found stays so until one of the sequence's blocks becomes findable, and what is found until
    one of its blocks is forgotten. Only then they are looked up again.
    """

    def __init__(
        self,
        groups: Sequence[WindowGroup],
        prefixes: list[Prefix],
        block_size: int,
        host_caches: Sequence[PrefixCache],
    ) -> None:
        self.prefixes = prefixes  # of the sequence, which may become more
        self._groups = groups
        self._block_size = block_size
        self._host_caches = host_caches
        self._caches = [*(group.cache for group in groups), *host_caches]
        self._times_added = [cache.times_added for cache in self._caches]
        self._digests: set[Digest] = set()  # of `prefixes`, once they are asked for
        self._num_digests = 0
        self._reaches: list[_Reach] = []  # of late

    def renew(self, most: int) -> tuple[int, tuple[WindowBlocks, ...]]:
        """Return what `match_windows` does by now."""
        if self._has_more():
            self._reaches.clear()
        reach = next((each for each in self._reaches if each.end <= most <= each.most), None)
        if reach is None:
            reach = self._look_up(most, most)
        else:
            self._reaches.remove(reach)
            if _times_forgotten(reach.places) != reach.times_forgotten:
                reach = self._look_up(reach.end, reach.most)
        self._reaches = [*self._reaches[-1:], reach]  # two: a step may ask how far the prompt goes, too
        return reach.end, reach.windows

    def _has_more(self) -> bool:
        """Return whether some of the sequence's blocks may have become findable since the last time."""
        before, self._times_added = self._times_added, [cache.times_added for cache in self._caches]
        counts = [now - then for now, then in zip(self._times_added, before, strict=True)]
        if not self._reaches or not any(counts):
            return False
        self._digests.update(prefix.digest for prefix in self.prefixes[self._num_digests :])
        self._num_digests = len(self.prefixes)
        added = zip(self._caches, counts, strict=True)
        return not all(self._digests.isdisjoint(cache.newest(count)) for cache, count in added)

    def _look_up(self, end: int, most: int) -> _Reach:
        """Look for where the sequence can go on; it is known that it is from nowhere between these."""
        end, windows = match_windows(self._groups, self.prefixes, end, self._block_size, self._host_caches)
        parts = [*(each.device for each in windows), *(each.host for each in windows)]
        places = [
            (cache, array("i", blocks)) for cache, blocks in zip(self._caches, parts, strict=False) if blocks
        ]
        return _Reach(end, most, windows, places, _times_forgotten(places))


def _times_forgotten(places: list[tuple[PrefixCache, array[int]]]) -> int:
    return sum(int(cache.times_forgotten(blocks).sum()) for cache, blocks in places)
