"""A real Ray is too large for every run. `make ray-test` installs it, and sets QUIRE_RAY."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

WITH_RAY = (
    "test_ray_autoscaling.py",
    "test_ray_gpus.py",
    "test_ray_nodes.py",
    "test_ray_serve.py",
    "test_routing.py",
)
NODE = {"num_cpus": 2, "num_gpus": 2}  # the GPUs are nowhere: Ray counts what it is told

collect_ignore = [] if os.environ.get("QUIRE_RAY") else list(WITH_RAY)
os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"  # where other tests run on the same cores
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray's name. Else what else runs goes before
os.environ["RAY_SERVE_SLOW_STARTUP_WARNING_S"] = "5"
os.environ["RAY_SERVE_SLOW_STARTUP_WARNING_PERIOD_S"] = "1"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A head node that has room for no replica, and two nodes, all on this machine."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, connect=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    for _ in range(2):
        cluster.add_node(**NODE)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[dict[int, Any]]:
    """The two nodes by their raylets, the parents of what runs there. One that is lost is replaced."""
    yield {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
    while len(cluster.worker_nodes) < 2:
        cluster.add_node(**NODE)


@pytest.fixture(scope="session")
def url(cluster: Cluster) -> Iterator[str]:
    """Of Ray's proxy."""
    from ray import serve

    from quire.loadtest.servers.server_process import free_port

    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
