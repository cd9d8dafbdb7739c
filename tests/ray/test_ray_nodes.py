"""Replicas on two nodes, without a registry: tenants have a replica each, which may vanish with its node."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from ray import serve

from tests.ray.serving import NAME, deploy, first_replica, parent_of, pid_at, repeat_prefixes, run, stream

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster


@pytest.fixture(scope="module", autouse=True)
def a_replica_a_node(url: str) -> Iterator[None]:
    deploy(2, num_cpus="2")  # all that a node has
    yield
    serve.delete(NAME)


def test_repeats_find_their_tenants_prefix_on_either_node(url: str, nodes: dict[int, Any]) -> None:
    """By where prompts were sent; room is shared equally."""

    async def work(session: aiohttp.ClientSession) -> None:
        hits, replicas = await repeat_prefixes(session, url)
        assert hits >= 0.95
        tenants = Counter(replica for each in replicas for replica in each)
        assert {parent_of(pid_at(replica)) for replica in tenants} == set(nodes)
        assert max(tenants.values()) <= 4  # of six

    run(work)


def test_a_node_that_dies_ends_its_streams_once_and_the_other_goes_on(
    url: str, cluster: Cluster, nodes: dict[int, Any]
) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        streams = [asyncio.create_task(stream(session, url, max_tokens=300)) for _ in range(10)]
        victim = await first_replica(session, url)
        node = nodes[parent_of(pid_at(victim))]
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        ended = await asyncio.gather(*streams)
        assert all(len(ends) == 1 for _, _, ends in ended)
        assert {ends[0] for replica, _, ends in ended if replica != victim} == {"done"}
        lost = Counter(ends[0] for replica, _, ends in ended if replica == victim)
        assert lost["replica_lost"] >= 1
        assert lost.keys() <= {"replica_lost", "done"}
        for _ in range(4):
            replica, _, ends = await stream(session, url, max_tokens=4)
            assert ends == ["done"]
            assert replica != victim

    run(work)
