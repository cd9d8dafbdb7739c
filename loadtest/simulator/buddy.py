"""A buddy allocator: contiguous chunks of 2^k slots out of one arena (Knuth, volume 1, section 2.5)."""

from __future__ import annotations


class BuddyAllocator:
    """Chunks are aligned to their size; an arena of any size is a row of powers of two, largest first."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"an arena needs at least one slot, got {size}")
        self.size = size
        self.used = 0  # slots in chunks that are taken
        self._free: dict[int, set[int]] = {}  # order -> offsets
        self._taken: dict[int, int] = {}  # offset -> order
        offset = 0
        for order in reversed(range(size.bit_length())):
            self._free[order] = set()
            if size >> order & 1:
                self._free[order].add(offset)
                offset += 1 << order

    @staticmethod
    def chunk_size(count: int) -> int:
        """Return the slots in the chunk that a request for `count` gets: the next power of two."""
        return 1 << max(count - 1, 0).bit_length()

    def allocate(self, count: int) -> int | None:
        """Return the offset of a chunk of at least `count` slots, split as little as can be; or None."""
        wanted = self.chunk_size(count).bit_length() - 1
        for order in range(wanted, self.size.bit_length()):
            if not self._free[order]:
                continue
            offset = min(self._free[order])
            self._free[order].remove(offset)
            for smaller in reversed(range(wanted, order)):
                self._free[smaller].add(offset + (1 << smaller))
            self._taken[offset] = wanted
            self.used += 1 << wanted
            return offset
        return None

    def free(self, offset: int) -> None:
        """Give a chunk back and join it with its buddy, as long as that is free as a whole."""
        order = self._taken.pop(offset)
        self.used -= 1 << order
        while (buddy := offset ^ (1 << order)) in self._free.get(order, ()):
            self._free[order].remove(buddy)
            offset = min(offset, buddy)
            order += 1
        self._free[order].add(offset)

    @property
    def chunks(self) -> dict[int, int]:
        """Return offset to size of the chunks that are taken."""
        return {offset: 1 << order for offset, order in self._taken.items()}
