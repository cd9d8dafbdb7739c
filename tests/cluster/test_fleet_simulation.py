"""Whether prefixes stay where they are put: fleets of replicas that evict, on virtual time.

Publishers, the registry and routers are the real ones, and so is the Redis between them.
"""

from __future__ import annotations

import pytest

from quire.loadtest.registry_scale.costs import RedisCosts
from quire.loadtest.registry_scale.fleet import Simulation
from quire.loadtest.servers.redis_server import RedisServer

PREFIX = 60  # blocks
SLACK = 1.1
IN_FLIGHT = 10  # blocks for what two requests at once add to their prefixes
COSTS = RedisCosts(
    publish_us=30, change_us=0.4, lookup_us=30, replica_us=3, probe_us=0.7, listed_us=5, block_bytes=84,
    replica_bytes=50_000, publish_wait_us=100, lookup_wait_us=200,
)  # fmt: skip

fleets = pytest.mark.parametrize(("num_replicas", "tenants_each"), [(2, 2), (2, 4), (3, 4), (4, 2), (4, 7)])


def fleet(
    redis: RedisServer, num_replicas: int, tenants_each: int, seed: int, num_routers: int = 1
) -> Simulation:
    """With room for so many prefixes in each replica, and a tenth more."""
    capacity = int(tenants_each * PREFIX * SLACK) + IN_FLIGHT
    return Simulation(redis.url, COSTS, num_replicas, capacity, seed, num_routers=num_routers)


@fleets
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("shared", [0, 30])
def test_what_fits_is_found_again(
    redis_server: RedisServer, num_replicas: int, tenants_each: int, at_once: bool, shared: int
) -> None:
    """Whether tenants come first all at once or one by one, and whatever their prefixes have in common."""
    tenants = num_replicas * tenants_each
    with fleet(redis_server, num_replicas, tenants_each, seed=1) as simulation:
        common = simulation.tokens(shared)
        prefixes = [common + simulation.tokens(PREFIX - shared) for _ in range(tenants)]
        simulation.run(prefixes, tenants if at_once else 1, are_repeats=False)
        assert simulation.rounds(prefixes, 8) >= 0.95
        assert simulation.rounds(prefixes, 4) == 1.0


@fleets
def test_routers_that_do_not_know_each_other_settle(
    redis_server: RedisServer, num_replicas: int, tenants_each: int
) -> None:
    """Each sees a part of the requests; evictions tell them what the others do."""
    with fleet(redis_server, num_replicas, tenants_each, seed=2, num_routers=2) as simulation:
        prefixes = [simulation.tokens(PREFIX) for _ in range(num_replicas * tenants_each)]
        simulation.run(prefixes, 1, are_repeats=False)
        simulation.rounds(prefixes, 16)
        assert simulation.rounds(prefixes, 4) >= 0.95


@fleets
def test_prefixes_move_to_replicas_that_join(
    redis_server: RedisServer, num_replicas: int, tenants_each: int
) -> None:
    """Each no more than once, and none that needs not."""
    tenants = num_replicas * tenants_each
    with fleet(redis_server, 1, tenants_each, seed=3) as simulation:
        prefixes = [simulation.tokens(PREFIX) for _ in range(tenants)]
        simulation.rounds(prefixes, 3)
        simulation.join(num_replicas - 1)
        simulation.settle()
        simulation.rounds(prefixes, 12)
        assert simulation.rounds(prefixes, 4) == 1.0
        assert simulation.moves <= tenants - tenants_each


def test_what_does_not_fit_is_not_tossed_about(redis_server: RedisServer) -> None:
    """Nine prefixes, and twice room for four and a half."""
    with Simulation(redis_server.url, COSTS, 2, int(4.5 * PREFIX), seed=4) as simulation:
        prefixes = [simulation.tokens(PREFIX) for _ in range(9)]
        simulation.rounds(prefixes, 30)
        assert simulation.moves <= 0.1 * simulation.repeats
        assert simulation.hits >= 0.5 * simulation.repeats
