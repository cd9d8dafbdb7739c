"""Whether prefixes stay where they are put: fleets of replicas that evict, on a virtual clock."""

from __future__ import annotations

import pytest

from quire.loadtest.registry_scale.fleet import Simulation

PREFIX = 60  # blocks
SLACK = 1.1
IN_FLIGHT = 10  # blocks for what two requests at once add to their prefixes

fleets = pytest.mark.parametrize(("num_replicas", "tenants_each"), [(2, 2), (2, 4), (3, 4), (4, 2), (4, 7)])


def fleet(num_replicas: int, tenants_each: int, seed: int, num_routers: int = 1) -> Simulation:
    """With room for so many prefixes in each replica, and a tenth more."""
    simulation = Simulation(
        num_replicas, int(tenants_each * PREFIX * SLACK) + IN_FLIGHT, seed, num_routers=num_routers
    )
    simulation.settle()
    return simulation


@fleets
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("shared", [0, 6, 30])
def test_what_fits_is_found_again(num_replicas: int, tenants_each: int, at_once: bool, shared: int) -> None:
    """Whether tenants come first all at once or one by one, and whatever their prefixes have in common."""
    tenants = num_replicas * tenants_each
    for seed in range(2):
        simulation = fleet(num_replicas, tenants_each, seed)
        common = simulation.digests(shared)
        prefixes = [common + simulation.digests(PREFIX - shared) for _ in range(tenants)]
        simulation.run(prefixes, tenants if at_once else 1, are_repeats=False)
        assert simulation.rounds(prefixes, 8) >= 0.95
        assert simulation.rounds(prefixes, 8) == 1.0


@fleets
def test_routers_that_do_not_know_each_other_settle(num_replicas: int, tenants_each: int) -> None:
    """Each sees a part of the requests; evictions tell them what the others do."""
    for seed in range(3):
        simulation = fleet(num_replicas, tenants_each, seed, num_routers=2)
        prefixes = [simulation.digests(PREFIX) for _ in range(num_replicas * tenants_each)]
        simulation.run(prefixes, 1, are_repeats=False)
        simulation.rounds(prefixes, 16)
        assert simulation.rounds(prefixes, 8) >= 0.95


@fleets
def test_prefixes_move_to_replicas_that_join(num_replicas: int, tenants_each: int) -> None:
    """Each no more than once, and none that needs not."""
    for seed in range(3):
        simulation = fleet(num_replicas, tenants_each, seed)
        (router,) = simulation.routers
        everybody = router.replicas
        router.replicas = everybody[:1]
        prefixes = [simulation.digests(PREFIX) for _ in range(num_replicas * tenants_each)]
        simulation.rounds(prefixes, 3)
        router.replicas = everybody
        simulation.rounds(prefixes, 12)
        assert simulation.rounds(prefixes, 8) == 1.0
        assert simulation.moves <= (num_replicas - 1) * tenants_each


def test_what_does_not_fit_is_not_tossed_about() -> None:
    """Nine prefixes, and twice room for four and a half."""
    for seed in range(3):
        simulation = Simulation(2, int(4.5 * PREFIX), seed)
        prefixes = [simulation.digests(PREFIX) for _ in range(9)]
        simulation.rounds(prefixes, 30)
        assert simulation.moves <= 0.1 * simulation.repeats
        assert simulation.hits >= 0.5 * simulation.repeats
