"""Replicas that evict, a registry that lags and routers that place, on a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.engine.hashing import Digest
from quire.engine.registry.redis import Load
from quire.service.router.placement import Location, choose
from quire.service.router.replica import Replica

BLOCK_SIZE = 16
FINGERPRINT = "f"
PUBLISH_SECONDS = 0.1
REPORT_SECONDS = 0.5
PREFILL_SECONDS = 0.004  # a block
ANSWER_SECONDS = 0.1


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def later(self, seconds: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), what))

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.now, _, what = heapq.heappop(self._due)
            what()


@dataclass
class Server:
    """A replica: least recently used blocks go first, the end of a prompt before its beginning."""

    url: str
    capacity: int
    running: int = 0
    epoch: int = 1
    requests: int = 0  # since the start
    cached: OrderedDict[Digest, None] = field(default_factory=OrderedDict)
    active: Counter[Digest] = field(default_factory=Counter)
    published: set[Digest] = field(default_factory=set)

    def begin(self, digests: Sequence[Digest]) -> tuple[int, list[Digest]]:
        """How many blocks were found, and which ones had to go."""
        found = 0
        for digest in digests:
            if digest not in self.cached and digest not in self.active:
                break
            found += 1
        for digest in digests:
            self.cached.pop(digest, None)
            self.active[digest] += 1
        evicted = []
        while self.cached and len(self.cached) + len(self.active) > self.capacity:
            evicted.append(self.cached.popitem(last=False)[0])
        return found, evicted

    def restart(self) -> None:
        """Forget all that is cached, as a new process does; what runs goes on."""
        self.epoch += 1
        self.cached.clear()
        self.published.clear()

    def end(self, digests: Sequence[Digest]) -> None:
        for digest in reversed(digests):
            self.active[digest] -= 1
            if not self.active[digest]:
                del self.active[digest]
                self.cached[digest] = None


class Router:
    def __init__(self, servers: Sequence[Server], rng: random.Random) -> None:
        self.replicas = [Replica(server.url, up=True) for server in servers]
        for replica in self.replicas:
            replica.fingerprint = FINGERPRINT
        self.rng = rng


class Simulation:
    """Counts the repeats of prefixes, how many of them found theirs, and how many moved."""

    def __init__(self, num_replicas: int, capacity: int, seed: int, num_routers: int = 1) -> None:
        self.clock = Clock()
        self.rng = random.Random(seed)
        self.servers = [Server(f"http://r{number}:80", capacity) for number in range(num_replicas)]
        self.routers = [Router(self.servers, self.rng) for _ in range(num_routers)]
        self.hits = self.repeats = self.moves = 0
        self._reports = itertools.count()
        self._digests = itertools.count()
        self._in_flight = 0
        self._report()

    def digests(self, count: int) -> list[Digest]:
        """New ones."""
        return [next(self._digests).to_bytes(16, "little") for _ in range(count)]

    def send(self, prefix: list[Digest], *, question_blocks: int = 2, is_repeat: bool = True) -> None:
        now, router = self.clock.now, self.rng.choice(self.routers)
        digests = prefix + self.digests(question_blocks)
        held = {server.url: _common(digests, server.published) for server in self.servers}
        tokens = len(digests) * BLOCK_SIZE + 5
        location = Location(tokens, {FINGERPRINT: digests}, {FINGERPRINT: BLOCK_SIZE}, held)
        placement = choose(router.replicas, location, now, router.rng, silent=False)
        replica = placement.replica
        server = self.servers[router.replicas.index(replica)]
        found, evicted = server.begin(digests)
        self.moves += placement.reason == "moved"
        if is_repeat:
            self.repeats += 1
            self.hits += found >= 0.95 * len(prefix)
        self._in_flight += 1
        server.running += 1
        server.requests += 1
        replica.in_flight += 1
        prefill = (len(digests) - found) * PREFILL_SECONDS * server.running

        def computed() -> None:
            replica.sent_prefixes.answered(digests, self.clock.now)
            self.clock.later(PUBLISH_SECONDS, lambda: server.published.update(digests))
            self.clock.later(ANSWER_SECONDS, answered)

        def answered() -> None:
            server.end(digests)
            server.running -= 1
            replica.in_flight -= 1
            self._in_flight -= 1

        self.clock.later(PUBLISH_SECONDS, lambda: server.published.difference_update(evicted))
        self.clock.later(prefill, computed)

    def run(self, order: Sequence[list[Digest]], concurrency: int, *, are_repeats: bool = True) -> None:
        """So many at once."""
        for prefix in order:
            self.clock.run(lambda: self._in_flight < concurrency)
            self.send(prefix, is_repeat=are_repeats)
        self.settle()

    def rounds(self, prefixes: Sequence[list[Digest]], count: int, concurrency: int = 2) -> float:
        """All prefixes in random order, again and again. How many of the requests found theirs."""
        self.hits = self.repeats = 0
        for _ in range(count):
            self.run(self.rng.sample(prefixes, len(prefixes)), concurrency)
        return self.hits / self.repeats

    def settle(self, seconds: float = 2.0) -> None:
        self.clock.run(lambda: self._in_flight == 0)
        end = self.clock.now + seconds
        self.clock.run(lambda: self.clock.now >= end)

    def _report(self) -> None:
        """As it is now, it is known a little later."""
        loads = [Load(running=server.running, blocks=server.capacity) for server in self.servers]
        epochs = [str(server.epoch) for server in self.servers]
        seq = next(self._reports)

        def tell() -> None:
            for router in self.routers:
                for replica, load, epoch in zip(router.replicas, loads, epochs, strict=False):
                    replica.report(load, epoch, seq, self.clock.now)

        if seq == 0:
            tell()
        self.clock.later(PUBLISH_SECONDS, tell)
        self.clock.later(REPORT_SECONDS, self._report)


def _common(digests: Sequence[Digest], held: set[Digest]) -> int:
    for count, digest in enumerate(digests):
        if digest not in held:
            return count
    return len(digests)
