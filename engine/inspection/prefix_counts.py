"""How often texts of the prefix cache are found and lost, while somebody looks at them."""

from __future__ import annotations

from collections import Counter

from quire.engine.hashing import Digest, Prefix
from quire.engine.inspection.replay import read_moves
from quire.engine.memory.manager import BlockManager
from quire.engine.memory.move_kinds import DEVICE, HIT


class PrefixCounts:
    """Counts from its beginning to `close`: hits by the moves that are kept, evictions as they come."""

    def __init__(self, blocks: BlockManager) -> None:
        self.hits: Counter[Digest] = Counter()  # of cached blocks that tables have named since
        self.evictions: Counter[Digest] = Counter()  # by the block before the evicted one
        self.num_evictions = 0
        self._blocks = blocks
        self._position = blocks.ring.position
        self._published = {prefix.digest for prefix in blocks.cache.prefixes()}
        blocks.cache.listeners.append(self._hear)

    def close(self) -> None:
        self._blocks.cache.listeners.remove(self._hear)

    def look(self) -> None:
        """Count the hits since the last time."""
        cache = self._blocks.cache
        begin, numbers = self._blocks.ring.since(self._position)
        self._position = begin + len(numbers) // 8
        for move in read_moves(numbers):
            if move.kind == HIT and move.place == DEVICE:
                self.hits.update(cache.prefix(block).digest for block in move.blocks if block in cache)

    def _hear(self, prefix: Prefix, is_published: bool) -> None:
        if is_published:
            self._published.add(prefix.digest)
        elif prefix.digest in self._published:
            self._published.remove(prefix.digest)
            self.num_evictions += 1
            self.hits.pop(prefix.digest, None)
            self.evictions.pop(prefix.digest, None)
            if prefix.before is not None and prefix.before.digest in self._published:
                self.evictions[prefix.before.digest] += 1
