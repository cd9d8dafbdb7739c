"""One process of a replica: what it caches, and the publisher that tells the registry of it."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from quire.engine.config import StepStats
from quire.engine.hashing import Digest, Prefix
from quire.engine.memory.prefix_cache import PrefixCache
from quire.engine.registry.publisher import Publisher
from quire.engine.registry.redis import Registry
from quire.loadtest.registry_scale.old_blocks import FullJournal, OldBlocks

LEASE = 15.0
SPARE_BLOCKS = 4096  # more than there are, for what runs at once


@dataclass(slots=True)
class _Active:
    block: int
    references: int = 1


class ReplicaProcess:
    """Least recently used blocks go first, the end of a prompt before its beginning.

    The prefix cache, the journal that follows it and the publisher are the engine's own.
    """

    def __init__(self, registry: Registry, capacity: int, clock: Callable[[], float], old: OldBlocks) -> None:
        """Begin with a cache of `old` blocks, and its publication."""
        self.running = 0
        self._capacity = capacity
        self._registry = registry
        self._cache = PrefixCache(capacity + SPARE_BLOCKS)
        self._unused = itertools.count()
        self._free: list[int] = []
        self._old = old
        self._going: deque[int] = deque()  # blocks of the old prompt that goes
        self._cached: OrderedDict[Digest, int] = OrderedDict()
        self._active: dict[Digest, _Active] = {}
        self._journal = FullJournal(self._cache, self._old)
        self.publisher = Publisher(registry, self._journal, LEASE, capacity, clock)

    def __len__(self) -> int:
        """Return how many published blocks there are."""
        return len(self._cache) + len(self._old)

    def begin(self, digests: Sequence[Digest]) -> int:
        """Make room for a prompt; return how many of its blocks are there, or are being computed."""
        missing = [digest for digest in digests if digest not in self._cached and digest not in self._active]
        found = len(digests) if not missing else digests.index(missing[0])
        for digest in digests:
            active = self._active.get(digest)
            if active is not None:
                active.references += 1
            elif digest in self._cached:
                self._active[digest] = _Active(self._cached.pop(digest))
        for digest in missing:
            self._active[digest] = _Active(self._take())
        self.running += 1
        return found

    def computed(self, digests: Sequence[Digest]) -> None:
        """Let the blocks of a prompt be found by others."""
        before: Prefix | None = None
        for digest in digests:
            block = self._active[digest].block
            if block in self._cache:
                before = self._cache.prefix(block)
            else:
                before = Prefix(before, b"", digest)
                self._cache.publish(before, block)

    def end(self, digests: Sequence[Digest]) -> None:
        for digest in reversed(digests):
            active = self._active[digest]
            active.references -= 1
            if not active.references:
                del self._active[digest]
                self._cached[digest] = active.block
        self.running -= 1

    def tick(self) -> None:
        """Let the publisher do what its thread does."""
        self.publisher.observe(_stats(self.running))
        self.publisher.tick()

    def leave(self) -> None:
        """Be gone from the registry, as at the end of a lease."""
        self.publisher.stop()
        self.die()

    def die(self) -> None:
        """Tell nobody."""
        self._registry.disconnect()

    def _take(self) -> int:
        while self._count() >= self._capacity:
            if not self._going and self._old:
                self._recall()
            if self._going:
                block = self._going.popleft()
            elif self._cached:
                _, block = self._cached.popitem(last=False)
            else:
                break
            self._cache.forget(block)
            self._free.append(block)
        return self._free.pop() if self._free else next(self._unused)

    def _count(self) -> int:
        return len(self._active) + len(self._cached) + len(self._going) + len(self._old)

    def _recall(self) -> None:
        """Have the cache and its journal know the old prompt that goes next, as if they always had."""
        prefixes = self._old.take_prompt()
        listeners, self._cache.listeners = self._cache.listeners, []
        for prefix in prefixes:
            block = next(self._unused)
            self._cache.publish(prefix, block)
            self._going.appendleft(block)  # the end goes before the beginning
        self._cache.listeners = listeners
        self._journal.recall(prefixes)


@cache
def _stats(running: int) -> StepStats:
    fields = dict.fromkeys(StepStats.__struct_fields__, 0)
    return StepStats(**{**fields, "running": running, "sequences_running": running})
