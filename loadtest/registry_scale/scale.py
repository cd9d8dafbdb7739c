"""The table: fleets of different sizes, where their prefixes go, and what that asks of one Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from quire.engine.registry.redis import MAX_REPLICAS
from quire.loadtest.registry_scale.costs import PROMPT, RedisCosts
from quire.loadtest.registry_scale.fleet import Simulation
from quire.loadtest.registry_scale.publishing import Publishing
from quire.service.router.directory import TIMEOUT

PIECES = 200  # that a replica's cache is simulated in, since a thousand times 50,000 blocks are too many
PREFIX_PIECES = 43
PREFIXES_EACH = 4  # a replica, so that a seventh of its room is left for what runs
BUSY = 0.7  # of one thread's time, above which waits grow quickly


@dataclass(frozen=True, slots=True)
class FleetSize:
    """A fleet of one registry. Redis' share is of one core: it has one thread for commands."""

    replicas: int
    hits: float  # of repeats that found their prefix
    hits_after_restarts: float  # of those in the round in which a tenth of the replicas began anew
    imbalance: float  # requests of the busiest replica ÷ the mean
    moves: int
    publications_a_second: float
    changes_a_second: float
    lookups_a_second: float
    lookup_us: float  # of Redis' time, where replicas hold nothing of the prompt
    shared_lookup_us: float  # where all replicas hold its first block, as of a system prompt that all share
    redis_share: float
    shared_redis_share: float
    memory_gb: float
    whole_again_seconds: float  # of Redis' time, to take everything anew
    choice_ms: float  # of a router's time, for one request


def measure_fleet(
    replicas: int, blocks: int, rate: float, rounds: int, publishing: Publishing, costs: RedisCosts
) -> FleetSize:
    """Simulate one; `rate`: requests a second and replica."""
    simulation = Simulation(replicas, PIECES, seed=replicas)
    simulation.settle()
    prefixes = [simulation.digests(PREFIX_PIECES) for _ in range(PREFIXES_EACH * replicas)]
    concurrency = 2 * replicas
    simulation.run(prefixes, concurrency, are_repeats=False)
    begin, sent = time.process_time(), sum(server.requests for server in simulation.servers)
    hits = simulation.rounds(prefixes, rounds, concurrency)
    requests = [server.requests for server in simulation.servers]
    choice = (time.process_time() - begin) / (sum(requests) - sent)
    for server in simulation.rng.sample(simulation.servers, max(1, replicas // 10)):
        server.restart()
    after = simulation.rounds(prefixes, 1, concurrency)
    lookups = rate * replicas
    lookup = costs.looking_up(replicas, 0, PROMPT)
    shared = costs.looking_up(replicas, replicas, PROMPT)
    published = replicas * costs.publishing(publishing.publications_a_second, publishing.changes_a_second)
    again = replicas * costs.publishing(publishing.anew_publications, publishing.anew_changes)
    return FleetSize(
        replicas=replicas,
        hits=round(hits, 4),
        hits_after_restarts=round(after, 4),
        imbalance=round(max(requests) * replicas / sum(requests), 3),
        moves=simulation.moves,
        publications_a_second=round(replicas * publishing.publications_a_second, 1),
        changes_a_second=round(replicas * publishing.changes_a_second),
        lookups_a_second=round(lookups, 1),
        lookup_us=round(lookup, 1),
        shared_lookup_us=round(shared, 1),
        redis_share=round((published + lookups * lookup) / 1e6, 4),
        shared_redis_share=round((published + lookups * shared) / 1e6, 4),
        memory_gb=round(replicas * (costs.replica_bytes + blocks * costs.block_bytes) / 1e9, 3),
        whole_again_seconds=round(again / 1e6, 2),
        choice_ms=round(choice * 1e3, 3),
    )


@dataclass(frozen=True, slots=True)
class Ends:
    """Replicas up to which one Redis is enough."""

    busy: int  # its thread, where prompts have nothing in common
    shared_busy: int  # where all replicas hold the first block of all prompts
    lookup_timeout: int  # a lookup alone takes as long as a router waits, where they do
    looked_at: int  # of a deployment, by a lookup


def find_ends(rate: float, publishing: Publishing, costs: RedisCosts) -> Ends:
    """Return the largest fleets; `rate`: requests a second and replica."""
    published = costs.publishing(publishing.publications_a_second, publishing.changes_a_second)

    def share(replicas: int, *, shared: bool) -> float:
        lookup = costs.looking_up(replicas, replicas if shared else 0, PROMPT)
        return replicas * (published + rate * lookup) / 1e6

    sizes = range(1, 100_000)
    return Ends(
        busy=_last(sizes, lambda size: share(size, shared=False) <= BUSY),
        shared_busy=_last(sizes, lambda size: share(size, shared=True) <= BUSY),
        lookup_timeout=_last(sizes, lambda size: costs.looking_up(size, size, PROMPT) <= TIMEOUT * 1e6),
        looked_at=MAX_REPLICAS,
    )


def _last(sizes: range, is_enough: Callable[[int], bool]) -> int:
    """Return the last one before the first that is not."""
    return next((size for size in sizes if not is_enough(size)), sizes.stop) - 1


def as_text(fleets: Sequence[FleetSize], ends: Ends) -> str:
    """Return it for a terminal."""
    names = list(asdict(fleets[0]))
    width = max(map(len, names))
    lines = [
        f"{name:<{width}} " + " ".join(f"{asdict(fleet)[name]:>10}" for fleet in fleets) for name in names
    ]
    ended = ", ".join(f"{name} {value}" for name, value in asdict(ends).items())
    return "\n".join([*lines, f"one Redis is enough for, at most: {ended}"])
