"""A Redis behind a fault proxy, CPU replicas of the demo model and a router, as processes on loopback."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from quire.loadtest.client.counters import read_samples
from quire.loadtest.cluster_demo.redis_faults import ProxiedRedis
from quire.loadtest.servers.fault_proxy import FaultProxy
from quire.loadtest.servers.quire_process import START_SECONDS, quire
from quire.loadtest.servers.redis_server import RedisServer
from quire.loadtest.servers.server_process import free_port
from quire.service.demo import MODEL_FOLDER

REPLICAS = 2
BLOCK_SIZE = 16
LOOK_SECONDS = 0.5  # seldom, as what is looked at is being measured


@dataclass(frozen=True)
class Cluster:
    replicas: list[str]
    router: str
    redis: ProxiedRedis

    def wait_until_whole(self) -> None:
        """Wait until Redis holds all that the replicas have, and the router reads it."""
        deadline = time.monotonic() + START_SECONDS
        while not self._is_whole():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the registry did not become whole within {START_SECONDS:.0f} s")
            time.sleep(LOOK_SECONDS)

    def time_recovery(self, over: Event) -> float:
        """Return the seconds from the end of a fault until the registry is whole."""
        if not over.wait(START_SECONDS):
            raise RuntimeError(f"the fault was not over within {START_SECONDS:.0f} s")
        begin = time.monotonic()
        self.wait_until_whole()
        return time.monotonic() - begin

    def lookup_seconds(self) -> float:
        """Return what all requests so far have waited for the registry."""
        return read_samples(self.router)["quire_route_lookup_seconds_sum"]

    def _is_whole(self) -> bool:
        server = self.redis.server
        if not all(server.is_whole(url) for url in self.replicas):
            return False
        for url in self.replicas:
            metrics = read_samples(url)
            held = server.count_blocks(url)
            if not metrics['quire_registry_state{state="ok"}'] or metrics["quire_registry_blocks"] != held:
                return False
        metrics = read_samples(self.router)
        ready = metrics['quire_route_replicas{state="ready"}']
        return ready == len(self.replicas) and bool(metrics['quire_route_registry_state{state="ok"}'])


@contextlib.contextmanager
def start_cluster(num_blocks: int, context: int) -> Iterator[Cluster]:
    """Yield all of it ready; a replica has so many KV blocks, and room for a `context` of so many tokens."""
    with tempfile.TemporaryDirectory(prefix="quire-cluster-") as folder, contextlib.ExitStack() as stack:
        model = str(_make_model(Path(folder) / "tiny", context))
        server = RedisServer(Path(folder))
        stack.callback(server.kill)
        proxy = stack.enter_context(contextlib.closing(FaultProxy(server.port)))
        registry = ["--redis-url", proxy.url]
        engine = ["--device", "cpu", "--load-format", "dummy", "--swap-space", "0"]
        engine += ["--num-gpu-blocks-override", str(num_blocks), "--block-size", str(BLOCK_SIZE)]
        ports = [free_port() for _ in range(REPLICAS + 1)]
        commands = [["route"], *[["serve", *engine]] * REPLICAS]
        processes = [
            stack.enter_context(quire(*command, model, *registry, port=port))
            for command, port in zip(commands, ports, strict=True)
        ]
        for process in processes:
            process.wait_until_ready()
        router, *replicas = (process.url for process in processes)
        cluster = Cluster(replicas, router, ProxiedRedis(server, proxy))
        cluster.wait_until_whole()
        yield cluster


def _make_model(folder: Path, context: int) -> Path:
    """Copy the demo model without its weights, and with room for `context` tokens."""
    shutil.copytree(MODEL_FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_bytes())
    config["max_position_embeddings"] = context
    (folder / "config.json").write_text(json.dumps(config))
    return folder
