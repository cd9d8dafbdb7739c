"""How much of a sequence can be found: looked up once, and then only where something has changed."""

from __future__ import annotations

from array import array

import numpy as np

from quire.engine.memory.prefix_cache import Found, Prefix, PrefixCache


class Match:
    """The blocks that hold a sequence's first tokens, on the device and after those in host memory.

    A group that waits for room is asked for them in each step, and may have thousands. So those that were
    found stay found until their cache forgets them, and only what follows is looked up again.
    """

    def __init__(self, prefixes: list[Prefix], device: PrefixCache, host: PrefixCache) -> None:
        self.prefixes = prefixes  # of the sequence, which may become more
        self._device = _Places(device)
        self._host = _Places(host)

    def renew(self) -> Found:
        """What is found by now."""
        device, host, end = self._device, self._host, len(self.prefixes)
        device.cut()
        device.follow(self.prefixes, end)
        host.cut()
        host.begin_at(device.end, self.prefixes)
        host.follow(self.prefixes, end)
        return Found(device.blocks[:], host.blocks[:])


class _Places:
    """Blocks of one tier that hold a run of the prefixes, from the `begin`-th on."""

    def __init__(self, cache: PrefixCache, begin: int = 0) -> None:
        self.begin = begin
        self.blocks = array("i")
        self._cache = cache
        self._forgotten = array("q")  # how often each had been forgotten by then

    @property
    def end(self) -> int:
        return self.begin + len(self.blocks)

    def cut(self) -> None:
        """Leave out the first that is not found any more, and what comes after it."""
        if self.blocks:
            changed = self._cache.times_forgotten(self.blocks) != np.asarray(self._forgotten)
            first = int(changed.argmax())
            if changed[first]:
                del self.blocks[first:], self._forgotten[first:]

    def follow(self, prefixes: list[Prefix], end: int) -> None:
        """Go on before the `end`-th of `prefixes`, up to the first that is not found."""
        find, known = self._cache.find, len(self.blocks)
        for at in range(self.end, end):
            block = find(prefixes[at])
            if block is None:
                break
            self.blocks.append(block)
        if len(self.blocks) > known:
            self._forgotten.extend(self._cache.times_forgotten(self.blocks[known:]).tolist())

    def begin_at(self, begin: int, prefixes: list[Prefix]) -> None:
        """Begin with another prefix. What is known is kept, unless one before it is not found."""
        before = _Places(self._cache, begin)
        before.follow(prefixes, self.begin)
        if before.end >= self.begin:
            kept = slice(max(0, begin - self.begin), None)
            before.blocks += self.blocks[kept]
            before._forgotten += self._forgotten[kept]
        self.begin, self.blocks, self._forgotten = begin, before.blocks, before._forgotten
