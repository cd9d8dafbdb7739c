"""The blocks of one memory tier: ids, reference counts, the free list and the order of eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import filterfalse, islice

import numpy as np

from quire.engine.memory.move_kinds import DEVICE, DISCARD, EVICT, HOLD, KEEP, PIN, UNHOLD
from quire.engine.memory.move_ring import MoveRing


class OutOfBlocks(Exception):
    """Raised when no block can be had; the caller must give some back first."""


class BlockPool:
    """Hands out block ids 0..num_blocks-1 and counts who refers to each (PagedAttention, section 4.2).

    A block is active while tables name it, and in transfer while only a copy under way holds it. After that
    it is cached if its content was marked worth keeping, else free. Cached blocks are given out again
    when no free one is left, the one cached first going first, but for those pinned. Nothing here knows what
    a block holds.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int], None],
        ring: MoveRing | None = None,
        tier: int = DEVICE,
    ) -> None:
        """ring: which hears what is kept and held; of tables it hears from those who have them."""
        self.num_blocks = num_blocks
        self._ring = ring or MoveRing(num_blocks)
        self._tier = tier
        self.references = 0  # by tables, over all blocks
        self.num_active = 0
        self.allocations = 0  # since start
        self.evictions = 0  # since start
        self._on_evict = on_evict
        self._counts = [0] * num_blocks  # tables that name it
        self._holds = [0] * num_blocks  # transfers that read or write it
        self._kept = [False] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest ids go first
        self._cached: OrderedDict[int, None] = OrderedDict()  # the next to evict first
        self._evictable = bytearray(num_blocks)  # which are in `_cached`
        self._copied = bytearray(num_blocks)  # which of those have a copy that is kept up, see `mark_copied`
        self._pinned: set[int] = set()
        self._resting: set[int] = set()  # cached and pinned, so not to be evicted

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self._resting)

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    @property
    def num_kept(self) -> int:
        """Return how many blocks have content that was marked worth keeping. O(blocks)."""
        return self._kept.count(True)

    @property
    def num_available(self) -> int:
        """Return how many blocks `allocate` can give: free and cached ones, but for those pinned."""
        return len(self._free) + len(self._cached)

    @property
    def num_in_transfer(self) -> int:
        """Return how many blocks no table names but a transfer still holds."""
        return self.num_blocks - self.num_active - self.num_free - self.num_cached

    def count(self, block: int) -> int:
        """Return the number of tables that name `block`."""
        return self._counts[block]

    def num_evictable(self, blocks: Sequence[int]) -> int:
        """Return how many of `blocks`, whose content is kept, `allocate` could give. Quick for an array."""
        return int(np.count_nonzero(np.frombuffer(self._evictable, np.bool_)[np.asarray(blocks, np.intp)]))

    def is_held(self, block: int) -> bool:
        """Return whether a transfer needs `block` as it is."""
        return self._holds[block] > 0

    def is_kept(self, block: int) -> bool:
        return self._kept[block]

    def is_pinned(self, block: int) -> bool:
        return block in self._pinned

    def allocate(self) -> int:
        """Return a block that one table names; evict a cached one if need be. Raises OutOfBlocks."""
        return self.allocate_many(1)[0]

    def allocate_many(self, count: int) -> list[int]:
        """Return `count` blocks for a table each, free ones first. OutOfBlocks: nothing has changed."""
        if count > self.num_available:
            raise OutOfBlocks
        num_free = min(count, len(self._free))
        blocks = self._free[len(self._free) - num_free :]
        del self._free[len(self._free) - num_free :]
        blocks.reverse()
        blocks += [self._evict() for _ in range(count - num_free)]
        for block in blocks:
            self._counts[block] = 1
        self.references += count
        self.num_active += count
        self.allocations += count
        return blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._evictable[block] = False
        self._kept[block] = False
        self.evictions += 1
        self._ring.mark(EVICT + self._tier, block)
        self._on_evict(block)
        return block

    def evict(self) -> int:
        """Free the cached block that would be given out first, before anybody needs it; return it."""
        block = self._evict()
        self._free.append(block)
        return block

    def next_to_evict(self, count: int) -> list[int]:
        """Return up to `count` cached blocks in the order in which they would be evicted."""
        return list(islice(self._cached, count))

    def next_to_copy(self, count: int) -> list[int]:
        """Return those of the next `count` blocks to be evicted that are not marked as copied, in order."""
        return list(filterfalse(self._copied.__getitem__, islice(self._cached, count)))

    def mark_copied(self, block: int) -> None:
        """Note that what cached `block` holds is elsewhere too, until it is cached anew or `mark_lost`."""
        self._copied[block] = True

    def mark_lost(self, block: int) -> None:
        """Note that the copy of `block` is gone."""
        self._copied[block] = False

    def refresh(self, block: int) -> None:
        """Make `block`, if it is cached, the last to be evicted."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def share(self, block: int) -> None:
        """Count one more table that names `block`, which is active or cached."""
        if self._counts[block] == 0:
            assert self._kept[block], f"block {block} holds nothing that could be shared"
            self._evictable[block] = False
            self._cached.pop(block, None)  # it may be in transfer instead
            self._resting.discard(block)
            self.num_active += 1
        self._counts[block] += 1
        self.references += 1

    def release(self, *blocks: int) -> None:
        """Count one table less that names each of `blocks`, in this order."""
        counts = self._counts
        for block in blocks:
            assert counts[block] > 0, f"block {block} is released more often than it was taken"
            counts[block] -= 1
            if counts[block] == 0:
                self.num_active -= 1
                self._settle(block)
        self.references -= len(blocks)

    def hold(self, block: int) -> None:
        """Keep `block` as it is for a transfer until `unhold`, whatever tables do."""
        if not self._counts[block]:
            assert self._holds[block] > 0 or self._kept[block]
            self._evictable[block] = False
            self._cached.pop(block, None)
            self._resting.discard(block)
        self._holds[block] += 1
        self._ring.mark(HOLD + self._tier, block)

    def unhold(self, block: int, *, evict_next: bool = False) -> None:
        """End a transfer's hold on `block`. evict_next: once cached, it is the first to go."""
        assert self._holds[block] > 0, f"no transfer holds block {block}"
        self._holds[block] -= 1
        self._ring.mark(UNHOLD + self._tier, block)
        if self._counts[block] == 0:
            self._settle(block)
            if evict_next and block in self._cached:
                self._cached.move_to_end(block, last=False)

    def keep(self, block: int) -> None:
        """Have the content of active `block` outlive its last reference."""
        assert self._counts[block] > 0, f"block {block} is not active"
        if not self._kept[block]:
            self._kept[block] = True
            self._ring.mark(KEEP + self._tier, block)

    def discard(self, block: int) -> None:
        """Have the content of `block`, which is not pinned, not be kept after all."""
        assert self._kept[block] and block not in self._pinned
        self._kept[block] = False
        self._ring.mark(DISCARD + self._tier, block)
        if block in self._cached:
            del self._cached[block]
            self._evictable[block] = False
            self._free.append(block)

    def pin(self, block: int) -> None:
        """Never give cached `block` out again."""
        assert block in self._cached or block in self._pinned, f"block {block} is not cached"
        if block in self._cached:
            del self._cached[block]
            self._evictable[block] = False
            self._resting.add(block)
        if block not in self._pinned:
            self._pinned.add(block)
            self._ring.mark(PIN + self._tier, block)

    def _settle(self, block: int) -> None:
        """Cache or free `block`, which has lost its last table or a transfer, unless another holds it."""
        if self._holds[block]:
            return
        if block in self._pinned:
            self._resting.add(block)
        elif self._kept[block]:
            self._cached[block] = None
            self._evictable[block] = True
            self._copied[block] = False
        else:
            self._free.append(block)
