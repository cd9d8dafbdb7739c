"""The table: fleets of different sizes, where their prefixes go, and what that asks of one Redis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from quire.engine.registry.publisher import BATCH
from quire.engine.registry.redis import MAX_REPLICAS
from quire.loadtest.registry_scale.costs import PROMPT, RedisCosts
from quire.loadtest.registry_scale.fleet import Server, Simulation
from quire.loadtest.registry_scale.replica_process import LEASE
from quire.loadtest.servers.redis_server import RedisServer
from quire.service.router.config import RouterConfig

PREFIXES_EACH = 2  # a replica
PREFIX_BLOCKS = 125  # of a tenant
SHARED_BLOCKS = 8  # of these, the first, as of a system prompt that all tenants have
FRESH_BLOCKS = 50  # of a request's question, that push out older ones
LEAST_REQUESTS = 1000  # that hits are counted of, before churn and in it
RESTARTS_A_SECOND = 0.02  # of each replica
DEATHS_A_SECOND = 0.01  # of each replica, in whose place another one joins
ROUTER_REQUESTS = 100  # a second, that one router process is for
JOINS = 50  # replicas that are filled before it is told how far it is
BUSY = 0.7  # of one thread's time, above which waits grow quickly


@dataclass(frozen=True, slots=True)
class FleetSize:
    """A fleet of one registry. Redis' share is of one core: it has one thread for commands."""

    replicas: int
    blocks: int  # of all replicas, as Redis counts them
    routers: int
    hits: float  # of repeats that found their prefix
    hits_in_churn: float  # while replicas begin anew, end and join
    imbalance: float  # requests of the busiest replica ÷ the mean
    unanswered: float  # of requests, for which the registry said nothing within 15 ms
    moves: int
    publications_a_second: float
    changes_a_second: float
    lookups_a_second: float
    lookup_us: float  # of Redis' time, as measured before
    redis_share: float  # of a core, that all it was asked for comes to by the measured costs
    spent_share: float  # that the real Redis behind the simulation took for the same, in CPU time
    memory_gb: float
    whole_again_seconds: float  # of Redis' time, to take everything anew
    choice_ms: float  # of a router's time, for one request


def measure_fleet(
    server: RedisServer,
    costs: RedisCosts,
    replicas: int,
    blocks: int,
    rate: float,
    least_requests: int = LEAST_REQUESTS,
    tell: Callable[[str], None] = lambda text: None,
) -> FleetSize:
    """Simulate one on an empty Redis that nobody else uses.

    blocks: that each replica has, in Redis too. rate: requests a second and replica. tell: is told how far
    it is.
    """
    requests_a_second = rate * replicas
    empty = server.used_bytes()
    with Simulation(
        server.url,
        costs,
        0,
        blocks,
        seed=replicas,
        num_routers=math.ceil(requests_a_second / ROUTER_REQUESTS),
        question_blocks=FRESH_BLOCKS,
    ) as simulation:
        while (joined := len(simulation.servers)) < replicas:
            tell(f"{joined:,} of {replicas:,} replicas hold {blocks:,} blocks each")
            simulation.join(min(JOINS, replicas - joined), filled=blocks)
        memory, held = server.used_bytes() - empty, server.count_blocks("*")
        simulation.settle(LEASE / 3 + 1)  # until routers know all, who are listed in the order of heartbeats
        shared = simulation.tokens(SHARED_BLOCKS)
        own = PREFIX_BLOCKS - SHARED_BLOCKS
        prefixes = [shared + simulation.tokens(own) for _ in range(PREFIXES_EACH * replicas)]
        simulation.arrive(prefixes, requests_a_second, are_repeats=False)
        tell(f"each of {len(prefixes):,} prefixes has been asked for once")
        rounds = math.ceil(least_requests / len(prefixes))
        busy = server.cpu_seconds()
        begin, before = simulation.now, replace(simulation.redis.asked)
        hits = _ask_again(simulation, prefixes, rounds, requests_a_second)
        seconds, asked = simulation.now - begin, simulation.redis.asked.since(before)
        busy = server.cpu_seconds() - busy
        requests = [each.requests for each in simulation.servers.values()]
        unanswered = sum(router.unanswered for router in simulation.routers) / sum(requests)
        tell(f"{100 * hits:.1f} % of the repeats hit")
        _churn(simulation, rounds * PREFIXES_EACH / rate)
        hits_in_churn = _ask_again(simulation, prefixes, rounds, requests_a_second)
        choices = sum(router.choices for router in simulation.routers)
        choosing = sum(router.choice_seconds for router in simulation.routers)
        moves = simulation.moves
    again = replicas * costs.publishing(math.ceil(blocks / BATCH), blocks)
    return FleetSize(
        replicas=replicas,
        blocks=held,
        routers=len(simulation.routers),
        hits=round(hits, 4),
        hits_in_churn=round(hits_in_churn, 4),
        imbalance=round(max(requests) * replicas / sum(requests), 3),
        unanswered=round(unanswered, 4),
        moves=moves,
        publications_a_second=round(asked.publications / seconds, 1),
        changes_a_second=round(asked.changes / seconds),
        lookups_a_second=round(asked.lookups / seconds, 1),
        lookup_us=round(asked.lookup_us / max(1, asked.lookups), 1),
        redis_share=round(asked.us / 1e6 / seconds, 4),
        spent_share=round(busy / seconds, 4),
        memory_gb=round(memory / 1e9, 3),
        whole_again_seconds=round(again / 1e6, 2),
        choice_ms=round(1e3 * choosing / choices, 3),
    )


def _ask_again(simulation: Simulation, prefixes: list[list[int]], rounds: int, a_second: float) -> float:
    """All prefixes in random order, again and again. How many of the requests found theirs."""
    simulation.hits = simulation.repeats = 0
    order = [each for _ in range(rounds) for each in simulation.rng.sample(prefixes, len(prefixes))]
    simulation.arrive(order, a_second)
    return simulation.hits / simulation.repeats


def _churn(simulation: Simulation, seconds: float) -> None:
    """Have replicas begin anew, and others join for those that end, at any time of the next seconds."""
    rng, servers = simulation.rng, list(simulation.servers.values())
    restarts = round(RESTARTS_A_SECOND * seconds * len(servers))
    deaths = min(round(DEATHS_A_SECOND * seconds * len(servers)), len(servers) // 2)
    dying = rng.sample(servers, deaths)
    staying = [server for server in servers if server not in dying]

    def die(server: Server) -> None:
        simulation.kill(server)
        simulation.join(1)

    for server in dying:
        simulation.later(rng.uniform(0, seconds), partial(die, server))
    for server in rng.choices(staying, k=restarts):
        simulation.later(rng.uniform(0, seconds), partial(simulation.restart, server))


@dataclass(frozen=True, slots=True)
class Ends:
    """Replicas up to which one Redis is enough, each asked for as much as those of a measured fleet."""

    busy: int  # its thread, where prompts of 512 blocks have nothing in common
    shared_busy: int  # where all replicas hold the first block of all prompts
    looked_at: int  # of a deployment, by a lookup


def find_ends(fleet: FleetSize, rate: float, costs: RedisCosts) -> Ends:
    """Return the largest fleets; `rate`: requests a second and replica."""
    publications, changes = fleet.publications_a_second, fleet.changes_a_second
    published = costs.publishing(publications / fleet.replicas, changes / fleet.replicas)
    poll = RouterConfig(model="", redis_url="redis://localhost").poll_seconds

    def share(replicas: int, *, shared: bool) -> float:
        seen = min(replicas, MAX_REPLICAS)
        lookups = rate * replicas * costs.looking_up(seen, seen if shared else 0, PROMPT)
        looks = math.ceil(rate * replicas / ROUTER_REQUESTS) / poll * costs.listing(seen)
        return (replicas * published + lookups + looks) / 1e6

    sizes = range(1, 100_000)
    return Ends(
        busy=_last(sizes, lambda size: share(size, shared=False) <= BUSY),
        shared_busy=_last(sizes, lambda size: share(size, shared=True) <= BUSY),
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
