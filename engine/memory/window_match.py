"""How far a prompt is found where layers see windows: up to where each cache group has what is read next."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.hashing import Prefix
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
        logical, first = end - 1, groups[at].first_block(end * block_size)
        while logical >= first and _is_found(prefixes[logical], device, *host):
            logical -= 1
        at += 1
        if logical >= first:  # nothing that reads this block can be found
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
