"""How blocks stand in all that their moves change, so that the moves can be undone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from quire.engine.inspection.messages import ExactPool, TableLine
from quire.engine.inspection.replay import IS_COMPUTING, IS_PINNED, KEPT
from quire.engine.memory.manager import BlockManager
from quire.engine.memory.move_kinds import DEVICE, HOST, KINDS
from quire.engine.memory.pool import BlockPool
from quire.engine.memory.prefix_cache import PrefixCache
from quire.engine.sequences.sequence import Sequence


def exact_pool(blocks: BlockManager, sequences: Iterable[Sequence]) -> ExactPool:
    """Return how the blocks stand, given all sequences there are. O(blocks)."""
    host = blocks.host
    tiers = (blocks.pool, host.pool)
    return ExactPool(
        counts=b"".join(np.array(pool._counts, np.int32).tobytes() for pool in tiers),
        holds=b"".join(np.array(pool._holds, np.int32).tobytes() for pool in tiers),
        flags=_flags(blocks.pool, blocks.caches) + _flags(host.pool, host.caches),
        lines=[line for sequence in sequences for line in _lines(sequence)],
    )


def _flags(pool: BlockPool, caches: list[PrefixCache]) -> bytes:
    flags = np.array(pool._kept, np.uint8) * np.uint8(KEPT)
    computing = set().union(*(cache.computing for cache in caches))
    for flag, those in ((IS_COMPUTING, computing), (IS_PINNED, pool._pinned)):
        flags[np.fromiter(those, np.intp)] |= flag
    return flags.tobytes()


def _lines(sequence: Sequence) -> Iterator[TableLine]:
    request, index = sequence.group.request.id, sequence.index
    for tier, tables in ((DEVICE, sequence.tables), (HOST, sequence.host_tables)):
        for group, table in enumerate(tables):
            if table.blocks:
                numbers = np.array(table.blocks, np.int32).tobytes()
                yield TableLine(request, index, tier + KINDS * group, table.first, numbers)
