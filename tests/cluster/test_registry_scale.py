"""One Redis under fleets of any size, in miniature: the table of docs/growing.md."""

from __future__ import annotations

import json
from dataclasses import replace

from quire.engine.registry.redis import MAX_REPLICAS
from quire.loadtest.registry_scale.costs import RedisCosts, measure
from quire.loadtest.registry_scale.publishing import FRESH_BLOCKS, simulate
from quire.loadtest.registry_scale.scale import BUSY, find_ends, measure_fleet
from quire.loadtest.servers.redis_server import RedisServer
from tests.docs.pages import PAGES, ROOT, section

COSTS = RedisCosts(
    publish_us=40, change_us=1, lookup_us=20, replica_us=1, probe_us=0.5, block_bytes=80, replica_bytes=1000,
    publish_wait_us=200, lookup_wait_us=200,
)  # fmt: skip


def test_costs_come_of_a_real_redis(redis_server: RedisServer) -> None:
    costs = measure(redis_server.client, f"{redis_server.url}?socket_timeout=60", 4096)
    assert 16 < costs.block_bytes < 200
    assert costs.publish_us > 0
    assert not redis_server.client.keys()


def test_a_replica_publishes_what_changes_and_no_more() -> None:
    blocks, rate, seconds = 2000, 4.0, 30.0
    published = simulate(blocks, rate, seconds)
    assert published.anew_changes == blocks
    each = published.changes_a_second * seconds / (2 * FRESH_BLOCKS)  # as many blocks come as go
    assert abs(each - rate * seconds) < 4 * (rate * seconds) ** 0.5
    assert published.longest_lag_seconds <= 0.1
    idle = simulate(blocks, 1e-6, seconds)
    assert idle.changes_a_second == 0
    assert idle.publications_a_second <= 2  # the load, twice a second at most


def test_prefixes_of_a_fleet_stay_where_they_are_and_come_back_after_restarts() -> None:
    publishing = simulate(2000, 1.0, 10.0)
    fleet = measure_fleet(10, 2000, 1.0, 2, publishing, COSTS)
    assert fleet.hits >= 0.95
    assert fleet.hits_after_restarts >= 0.85  # a tenth of the replicas has lost all
    assert fleet.imbalance < 1.5
    assert fleet.shared_lookup_us > fleet.lookup_us


def test_it_is_told_where_one_redis_ends() -> None:
    publishing = simulate(2000, 1.0, 10.0)
    ends = find_ends(1.0, publishing, COSTS)
    published = COSTS.publishing(publishing.publications_a_second, publishing.changes_a_second)

    def share(replicas: int) -> float:
        return replicas * (published + COSTS.looking_up(replicas, 0, 512)) / 1e6

    assert share(ends.busy) <= BUSY < share(ends.busy + 1)
    assert ends.shared_busy < ends.busy
    assert ends.looked_at == MAX_REPLICAS
    twice = find_ends(1.0, publishing, replace(COSTS, replica_us=2 * COSTS.replica_us))
    assert twice.busy < ends.busy


def test_the_page_has_the_figures_of_the_result() -> None:
    result = json.loads((ROOT / "loadtest/results/registry-scale.json").read_text())
    text = section(PAGES["docs/growing.md"], "How far one registry goes")
    for fleet in result["fleets"]:
        row = [
            f"{fleet['replicas']:,}",
            f"{100 * fleet['hits']:.1f}",
            f"{100 * fleet['hits_after_restarts']:.1f}",
            f"{fleet['imbalance']:.2f}",
            f"{fleet['publications_a_second']:,.0f}",
            f"{fleet['changes_a_second']:,.0f}",
            f"{fleet['lookup_us'] / 1000:.2f}; {fleet['shared_lookup_us'] / 1000:.2f}",
            f"{100 * fleet['redis_share']:.1f}; {100 * fleet['shared_redis_share']:.1f}",
            f"{fleet['memory_gb']:.2f}",
            f"{fleet['whole_again_seconds']:.1f}",
            f"{fleet['choice_ms']:.2f}",
        ]
        assert f"| {' | '.join(row)} |" in text
    assert all(f"{end:,}" in text for end in result["ends"].values())
