"""Assert what must hold of blocks at any moment: called after each operation in tests, sampled in production.

free + active + cached + in transfer = all, in each tier; a block's count = the tables that name it, and its
holds = the transfers and copies under way that read or write it; a digest stands for one block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.memory.host_tier import HostTier
from quire.engine.memory.manager import BlockManager
from quire.engine.memory.moves import Moves
from quire.engine.memory.pool import BlockPool
from quire.engine.memory.prefix_cache import PrefixCache
from quire.engine.sequences.sequence import NO_ROW
from quire.engine.sequences.sequence import Sequence as TokenSequence

EVERY = slice(None)  # the share of blocks, and of sequences, that is looked at


def check_memory(
    blocks: BlockManager,
    sequences: Iterable[TokenSequence],
    under_way: Iterable[Moves],
    share: slice = EVERY,
) -> None:
    """Check both tiers and all tables, given all sequences there are and the moves that are under way.

    With a `share`, what is said of each block and each sequence is asserted of these only.
    """
    sequences, moves = list(sequences), [*under_way, blocks.moves]
    transfers = [transfer.device for each in moves for transfer in each.transfers]
    sources = [source for each in moves for source, _ in each.copies.values()]
    tables = [sequence.blocks for sequence in sequences]
    check_pool(blocks.pool, tables, [*sources, *transfers], share)
    for cache in blocks.caches:
        check_prefix_cache(cache, share)
        for block in cache.computing:
            assert blocks.pool.count(block), f"block {block} is being computed, and no table names it"
            assert not blocks.pool.is_kept(block), f"block {block} is kept, and still being computed"
    copied = {source for source, _ in blocks.moves.copies.values()}
    written = {destination for _, destination in blocks.moves.copies.values()}
    assert copied.isdisjoint(written), "a copy reads what another writes"
    assert not any(map(blocks.pool.is_held, written)), "a copy writes what a transfer or a copy reads"
    for table in tables[share]:
        assert len(set(table)) == len(table), f"a table names a block twice: {table}"
    assert sum(map(len, blocks.caches)) + len(blocks.tails) == blocks.pool.num_kept
    assert not any(block in blocks.cache for block in blocks.tails.blocks()), "a tail has a digest"
    check_host_tier(blocks.host, sequences, moves, share)
    check_windows(blocks, sequences[share])
    _check_swapped(blocks, sequences[share])
    for sequence in sequences[share]:
        known = [prefix.content for prefix in sequence.prefixes]
        assert known == sequence.block_contents(blocks.block_size, 0, len(known)), "prefixes of other tokens"
        assert not blocks.has_prefix_cache or sequence.published <= len(known), "published without a prefix"


def check_windows(blocks: BlockManager, sequences: Iterable[TokenSequence]) -> None:
    """Check that the window tables of `sequences` end where their tables do."""
    for sequence in sequences:
        tables = sequence.window_tables
        assert len(tables) in (0, 0 if blocks.windows is None else len(blocks.windows)), "tables of others"
        assert blocks.full is not None or not sequence.table, "a table of layers that keep all tokens"
        assert tables or blocks.windows is None or not sequence.table, "no tables of window groups"
        for table in tables:
            assert table.end == sequence.num_blocks, "a table of a window group ends elsewhere"
        if sequence.row != NO_ROW and blocks.windows is not None:
            given_back = sum(table.first for table in tables) * blocks.block_size
            assert blocks._rows.given_back[sequence.row] == given_back, "tokens given back are miscounted"


def _check_swapped(blocks: BlockManager, sequences: Iterable[TokenSequence]) -> None:
    """Check that those of `sequences` that are swapped out have all that they are going to read."""
    for sequence in sequences:
        if not sequence.host_blocks:
            continue
        ends = {table.end for table in sequence.host_tables}
        assert ends == {blocks.blocks_for(sequence.saved_context)}, "host blocks for more tokens, or fewer"
        assert sequence.host_published <= len(sequence.prefixes), "published without a prefix"
        groups = [] if blocks.windows is None else blocks.windows.first_blocks(sequence.saved_context)
        for first, table in zip(groups, sequence.host_window_tables, strict=True):
            assert table.first <= first, "a host block is missing that is read"


def check_host_tier(
    host: HostTier, sequences: Iterable[TokenSequence], under_way: Iterable[Moves], share: slice = EVERY
) -> None:
    """Check host memory, given all sequences there are and the moves that are under way."""
    moves = list(under_way)
    spilling = [[transfer.host] for each in moves for transfer in each.spills]
    transfers = [transfer.host for each in moves for transfer in each.transfers]
    check_pool(host.pool, [*(sequence.host_blocks for sequence in sequences), *spilling], transfers, share)
    for cache in host.caches:
        check_prefix_cache(cache, share)
    assert sum(map(len, host.caches)) == host.pool.num_kept, "a host block is kept that nobody could find"
    device = host._device
    copied = np.frombuffer(device._copied, np.bool_) & np.frombuffer(device._evictable, np.bool_)
    for block in copied.nonzero()[0].tolist()[share]:
        cache, device_cache = host._caches_of(block)
        assert cache.find(device_cache.prefix(block)) is not None, f"block {block} has lost its copy"


def check_pool(
    pool: BlockPool, tables: Iterable[Sequence[int]], holds: Iterable[int] = (), share: slice = EVERY
) -> None:
    """Check a `share` of the blocks, given all tables and holds that exist."""
    blocks = range(pool.num_blocks)[share]

    def times(those: Iterable[int]) -> NDArray[np.intp]:
        """Return how often each of `blocks` is among them."""
        counted = np.bincount(np.fromiter(those, np.intp), minlength=pool.num_blocks)
        assert len(counted) == pool.num_blocks, "a block that does not exist"
        return counted[share]

    def agree(ours: list[int], others: NDArray[Any], what: str) -> None:
        theirs = others.tolist()  # lists of a few blocks are compared in a tenth of an array's time
        if ours != theirs:
            at = next(i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
            raise AssertionError(f"block {blocks[at]}: {ours[at]}, but {theirs[at]} {what}")

    counts, held = times(chain.from_iterable(tables)), times(holds)
    agree(pool._counts[share], counts, "tables name it")
    agree(pool._holds[share], held, "transfers hold it")
    idle = (counts + held) == 0
    kept, pinned = np.array(pool._kept[share], np.bool_), times(pool._pinned) > 0
    cached, resting = idle & kept & ~pinned, idle & pinned
    agree(times(pool._free).tolist(), idle & ~kept, "times on the free list")
    agree(list(pool._evictable[share]), cached, "to be evicted")
    agree([block in pool._cached for block in blocks], cached, "cached")
    agree(times(pool._resting).tolist(), resting, "resting")
    assert not np.count_nonzero(pinned & ~kept), "a pinned block holds nothing that could be found"
    assert pool.references == sum(pool._counts)
    assert pool.num_active == pool.num_blocks - pool._counts.count(0)


def check_prefix_cache(cache: PrefixCache, share: slice = EVERY) -> None:
    """Check that digests and blocks, `share` of them, map one to one."""
    prefixes = cache._prefixes
    for block, prefix in zip(range(len(prefixes))[share], prefixes[share], strict=True):
        assert prefix is None or cache._blocks[prefix.digest] == block, f"block {block} is found elsewhere"
    assert len(cache._blocks) == len(prefixes) - prefixes.count(None), "a digest of no block"
    assert all(block in cache for block in cache.computing), "a block is being computed that is not findable"
