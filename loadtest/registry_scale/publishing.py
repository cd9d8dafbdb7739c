"""What one replica publishes while requests come and go, by the publisher's own code on a virtual clock."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from quire.engine.config import StepStats
from quire.engine.hashing import Digest, Prefix
from quire.engine.memory.prefix_cache import PrefixCache
from quire.engine.registry.journal import Journal
from quire.engine.registry.publisher import TICK_SECONDS, Publisher
from quire.engine.registry.redis import Answer, Load, Registry

LEASE = 15.0
PREFIX_BLOCKS = 125  # of a tenant, that stay
FRESH_BLOCKS = 50  # of a request's question and answer, that push out older ones


@dataclass(frozen=True, slots=True)
class Publishing:
    """What a replica asks of Redis."""

    publications_a_second: float
    changes_a_second: float
    longest_lag_seconds: float
    anew_publications: int  # to publish everything again, as after a FLUSHALL
    anew_changes: int


class CountedRegistry(Registry):
    """A registry that is only counted; it answers as Redis does."""

    def __init__(self) -> None:
        self.held: set[Digest] = set()
        self.publications = self.changes = 0

    def publish(
        self,
        seq: int,
        added: list[Digest],
        removed: list[Digest],
        load: Load,
        *,
        anew: bool = False,
        whole: bool = True,
    ) -> Answer:
        if anew:
            self.held.clear()
        self.held.update(added)
        self.held.difference_update(removed)
        self.publications += 1
        self.changes += len(added) + len(removed)
        return Answer("OK", len(self.held))

    def disconnect(self) -> None:
        """There is no connection."""


def simulate(blocks: int, requests_a_second: float, seconds: float, seed: int = 0) -> Publishing:
    """Fill a replica's cache, half with tenants' prefixes, and let requests come for so long."""
    replica = _Replica(blocks, seed)
    registry, now = CountedRegistry(), 0.0
    publisher = Publisher(registry, Journal([replica.cache]), LEASE, blocks, clock=lambda: now)
    publisher.tick()
    anew_publications, anew_changes = registry.publications, registry.changes
    longest, begin = 0.0, (registry.publications, registry.changes)
    due = replica.rng.expovariate(requests_a_second)
    for tick in range(1, int(seconds / TICK_SECONDS) + 1):
        now = tick * TICK_SECONDS
        while due <= now:
            replica.serve()
            due += replica.rng.expovariate(requests_a_second)
        publisher.observe(_stats(replica.rng.randrange(8)))
        longest = max(longest, publisher.report().lag_seconds)
        publisher.tick()
    assert len(registry.held) == len(replica.cache) == blocks
    return Publishing(
        (registry.publications - begin[0]) / seconds,
        (registry.changes - begin[1]) / seconds,
        longest + TICK_SECONDS,
        anew_publications,
        anew_changes,
    )


class _Replica:
    """A full cache: prefixes that stay, and questions and answers after them, the oldest of which goes."""

    def __init__(self, blocks: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cache = PrefixCache(blocks)
        self._free = deque(range(blocks))
        self._tails: list[Prefix] = []
        self._fresh: deque[list[int]] = deque()  # the blocks of each request, the last one of it first
        while len(self._free) > blocks // 2:
            self._tails.append(self._grow(None, min(PREFIX_BLOCKS, len(self._free)))[-1])
        while self._free:
            self.serve()

    def serve(self) -> None:
        while self._fresh and len(self._free) < FRESH_BLOCKS:
            for block in self._fresh.popleft():
                self.cache.forget(block)
                self._free.append(block)
        first = len(self._free)
        blocks = [self._free[at] for at in range(min(FRESH_BLOCKS, first))]
        self._grow(self.rng.choice(self._tails), len(blocks))
        self._fresh.append(blocks[::-1])

    def _grow(self, before: Prefix | None, count: int) -> list[Prefix]:
        grown = []
        for _ in range(count):
            before = Prefix(before, b"", self.rng.randbytes(16))
            self.cache.publish(before, self._free.popleft())
            grown.append(before)
        return grown


def _stats(running: int) -> StepStats:
    fields = dict.fromkeys(StepStats.__struct_fields__, 0)
    return StepStats(**{**fields, "running": running})
