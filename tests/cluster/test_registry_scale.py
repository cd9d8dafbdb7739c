"""One Redis under fleets of any size, in miniature: the table of docs/growing.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.registry.redis import MAX_REPLICAS
from quire.loadtest.registry_scale.costs import RedisCosts, measure
from quire.loadtest.registry_scale.fleet import Simulation
from quire.loadtest.registry_scale.replica_process import LEASE
from quire.loadtest.registry_scale.scale import FRESH_BLOCKS, FleetSize, find_ends, measure_fleet
from quire.loadtest.servers.redis_server import RedisServer
from tests.docs.pages import PAGES, ROOT, section

COSTS = RedisCosts(
    publish_us=40, change_us=1, lookup_us=20, replica_us=1, probe_us=0.5, listed_us=3, block_bytes=80,
    replica_bytes=1000, publish_wait_us=200, lookup_wait_us=200,
)  # fmt: skip


@pytest.fixture
def redis(redis_server: RedisServer) -> Iterator[RedisServer]:
    """Empty before, and empty after: whatever was simulated leaves the registry."""
    assert not redis_server.client.keys()
    yield redis_server
    assert not redis_server.client.keys()


class CountingRedis(RedisServer):
    """Says that each command takes 1 µs of its CPU, those that a script calls too."""

    def cpu_seconds(self) -> float:
        statistics: Any = self.client.info("commandstats")
        return 1e-6 * sum(each["calls"] for name, each in statistics.items() if name != "cmdstat_info")


def test_a_fleet_is_charged_what_its_redis_spends(tmp_path: Path) -> None:
    """By the same account, Redis' own: here of commands, else of CPU time."""
    server = CountingRedis(tmp_path)
    try:
        costs = measure(server, 1024, rounds=3)
        # EVAL, TIME, HMGET, HSET, ZREMRANGEBYSCORE, ZADD, four times PEXPIRE, SCARD
        assert costs.publish_us == pytest.approx(11)
        assert costs.lookup_us == pytest.approx(3)  # EVAL_RO, TIME, ZRANGEBYSCORE
        assert costs.replica_us == pytest.approx(2)  # HMGET, SISMEMBER of the first block
        assert costs.listed_us == pytest.approx(1)  # HMGET
        assert costs.probe_us == pytest.approx(1, rel=0.2)  # SISMEMBER
        assert 16 < costs.block_bytes < 200
        fleet = measure_fleet(server, costs, 10, 1000, 1.0, least_requests=100)
        assert fleet.redis_share == pytest.approx(fleet.spent_share, rel=0.3)
    finally:
        server.kill()


def test_a_replica_publishes_what_changes_and_no_more(redis: RedisServer) -> None:
    blocks, requests = 2000, 40
    with Simulation(redis.url, COSTS, 0, blocks, 1, question_blocks=FRESH_BLOCKS) as simulation:
        simulation.join(1, filled=blocks)
        simulation.settle()
        (url,) = simulation.servers
        assert redis.count_blocks(url) == blocks
        before = replace(simulation.redis.asked)
        simulation.arrive([[]] * requests, 4.0)
        simulation.settle()
        asked = simulation.redis.asked.since(before)
        assert asked.changes == 2 * FRESH_BLOCKS * requests  # as many blocks come as go
        assert asked.lookups == requests
        assert redis.count_blocks(url) == len(simulation.servers[url].process) == blocks

        before = replace(simulation.redis.asked)
        simulation.settle(3 * LEASE)
        asked = simulation.redis.asked.since(before)
        assert asked.changes == asked.lookups == 0
        assert 8 <= asked.publications <= 9  # heartbeats: three in a lease


def test_a_replica_that_ends_without_a_word_is_believed_until_its_lease_ends(redis: RedisServer) -> None:
    """A request that is sent there goes to another one, and so do all after it."""
    with Simulation(redis.url, COSTS, 2, 400, seed=2) as simulation:
        prefix = simulation.tokens(60)
        simulation.run([prefix], 1, are_repeats=False)
        first, other = sorted(simulation.servers.values(), key=lambda server: -server.requests)
        simulation.kill(first)
        assert simulation.rounds([prefix], 4) == 3 / 4
        assert (first.requests, other.requests) == (1, 4)
        assert redis.count_blocks(first.url) > 0
        simulation.settle(LEASE)
        assert redis.count_blocks(first.url) == 0


def test_a_process_that_begins_anew_takes_its_blocks_along(redis: RedisServer) -> None:
    with Simulation(redis.url, COSTS, 1, 400, seed=3) as simulation:
        prefix = simulation.tokens(60)
        simulation.run([prefix], 1, are_repeats=False)
        (server,) = simulation.servers.values()
        simulation.restart(server)
        assert redis.count_blocks(server.url) == 0
        assert simulation.rounds([prefix], 4) == 3 / 4


def test_a_redis_that_has_too_much_to_do_is_not_waited_for(redis: RedisServer) -> None:
    """Routers find by what they have sent themselves, and blocks are published all the same."""
    busy = replace(COSTS, replica_us=20_000)
    with Simulation(redis.url, busy, 4, 1000, seed=4) as simulation:
        prefixes = [simulation.tokens(60) for _ in range(12)]
        simulation.run(prefixes, 4, are_repeats=False)
        assert simulation.rounds(prefixes, 4, concurrency=4) == 1.0
        (router,) = simulation.routers
        assert router.unanswered == router.choices
        assert sum(redis.count_blocks(url) for url in simulation.servers) > 12 * 60


@pytest.fixture(scope="module")
def miniature(redis_server: RedisServer) -> FleetSize:
    return measure_fleet(redis_server, COSTS, 10, 1000, 1.0, least_requests=200)


def test_prefixes_of_a_fleet_stay_where_they_are_and_come_back_in_churn(miniature: FleetSize) -> None:
    assert miniature.hits == 1.0
    assert 0.8 < miniature.hits_in_churn < 1.0
    assert miniature.imbalance < 2
    assert miniature.unanswered == 0
    assert miniature.blocks == 10 * 1000
    assert abs(miniature.changes_a_second - 10 * 2 * FRESH_BLOCKS) < 200
    assert 0 < miniature.redis_share < 0.1
    assert miniature.spent_share > 0


def test_it_is_told_where_one_redis_ends(miniature: FleetSize) -> None:
    ends = find_ends(miniature, 1.0, COSTS)
    assert ends.shared_busy < ends.busy
    assert ends.looked_at == MAX_REPLICAS
    twice = find_ends(miniature, 1.0, replace(COSTS, replica_us=2 * COSTS.replica_us))
    assert twice.busy < ends.busy


def test_the_page_has_the_figures_of_the_result() -> None:
    result = json.loads((ROOT / "loadtest/results/registry-scale.json").read_text())
    text = section(PAGES["docs/growing.md"], "How far one registry goes")
    for fleet in result["fleets"]:
        row = [
            f"{fleet['replicas']:,}",
            f"{fleet['blocks']:,}",
            f"{fleet['routers']}",
            f"{100 * fleet['hits']:.1f}",
            f"{100 * fleet['hits_in_churn']:.1f}",
            f"{fleet['imbalance']:.2f}",
            f"{fleet['publications_a_second']:,.0f}",
            f"{fleet['changes_a_second']:,.0f}",
            f"{fleet['lookups_a_second']:,.0f}",
            f"{fleet['lookup_us'] / 1000:.2f}",
            f"{100 * fleet['redis_share']:.1f}; {100 * fleet['spent_share']:.1f}",
            f"{100 * fleet['unanswered']:.1f}",
            f"{fleet['memory_gb']:.2f}",
            f"{fleet['whole_again_seconds']:.1f}",
            f"{fleet['choice_ms']:.2f}",
        ]
        assert f"| {' | '.join(row)} |" in text
    assert all(f"{end:,}" in text for end in result["ends"].values())
