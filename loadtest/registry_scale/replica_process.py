"""One process of a replica: what it caches, and the publisher that tells the registry of it."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from quire.engine.config import StepStats
from quire.engine.hashing import Digest, Prefix
from quire.engine.memory.prefix_cache import PrefixCache
from quire.engine.registry.journal import Journal
from quire.engine.registry.publisher import Publisher
from quire.engine.registry.redis import Registry

LEASE = 15.0
SPARE_BLOCKS = 4096  # more than there are, for what runs at once
OLD_PROMPT_BLOCKS = 125


@dataclass(slots=True)
class _Active:
    block: int
    references: int = 1


class ReplicaProcess:
    """Least recently used blocks go first, the end of a prompt before its beginning.

    The prefix cache, the journal that follows it and the publisher are the engine's own.
    """

    def __init__(
        self, registry: Registry, capacity: int, clock: Callable[[], float], rng: random.Random, filled: int
    ) -> None:
        """Begin with so many blocks `filled` with what nobody will ask for again."""
        self.running = 0
        self._capacity = capacity
        self._registry = registry
        self._cache = PrefixCache(capacity + SPARE_BLOCKS)
        self._unused = itertools.count()
        self._free: list[int] = []
        self._old: deque[int] = deque()
        self._cached: OrderedDict[Digest, int] = OrderedDict()
        self._active: dict[Digest, _Active] = {}
        self._fill(filled, rng)
        self.publisher = Publisher(registry, Journal([self._cache]), LEASE, capacity, clock)

    def __len__(self) -> int:
        """Return how many published blocks there are."""
        return len(self._cache)

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

    def _fill(self, count: int, rng: random.Random) -> None:
        while len(self._old) < count:
            before: Prefix | None = None
            blocks: list[int] = []
            for _ in range(min(OLD_PROMPT_BLOCKS, count - len(self._old))):
                before = Prefix(before, b"", rng.randbytes(16))
                blocks.append(next(self._unused))
                self._cache.publish(before, blocks[-1])
            self._old.extend(reversed(blocks))

    def _take(self) -> int:
        while len(self._active) + len(self._cached) + len(self._old) >= self._capacity:
            if self._old:
                block = self._old.popleft()
            elif self._cached:
                _, block = self._cached.popitem(last=False)
            else:
                break
            self._cache.forget(block)
            self._free.append(block)
        return self._free.pop() if self._free else next(self._unused)


@cache
def _stats(running: int) -> StepStats:
    fields = dict.fromkeys(StepStats.__struct_fields__, 0)
    return StepStats(**{**fields, "running": running})
