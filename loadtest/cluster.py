"""A Redis behind a fault proxy, CPU replicas of the demo model and a router, as processes on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from loadtest.fault_proxy import FaultProxy
from loadtest.redis_faults import ProxiedRedis
from loadtest.redis_server import RedisServer
from loadtest.server_process import free_port
from service.demo import MODEL_FOLDER

REPLICAS = 2
BLOCK_SIZE = 16
START_SECONDS = 120.0
LOOK_SECONDS = 0.5  # seldom, as what is looked at is being measured


@dataclass(frozen=True)
class Cluster:
    replicas: list[str]
    router: str
    redis: ProxiedRedis

    def wait_until_whole(self) -> None:
        """Redis holds all that the replicas have, and the router reads it."""
        deadline = time.monotonic() + START_SECONDS
        while not self._is_whole():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the registry did not become whole within {START_SECONDS:.0f} s")
            time.sleep(LOOK_SECONDS)

    def time_recovery(self, over: Event) -> float:
        """Seconds from the end of a fault until the registry is whole."""
        if not over.wait(START_SECONDS):
            raise RuntimeError(f"the fault was not over within {START_SECONDS:.0f} s")
        begin = time.monotonic()
        self.wait_until_whole()
        return time.monotonic() - begin

    def lookup_seconds(self) -> float:
        """What all requests so far have waited for the registry."""
        return _metrics(self.router)["quire_route_lookup_seconds_sum"]

    def _is_whole(self) -> bool:
        server = self.redis.server
        if not all(server.is_whole(url) for url in self.replicas):
            return False
        for url in self.replicas:
            metrics = _metrics(url)
            held = server.count_blocks(url)
            if not metrics['quire_registry_state{state="ok"}'] or metrics["quire_registry_blocks"] != held:
                return False
        metrics = _metrics(self.router)
        ready = metrics['quire_route_replicas{state="ready"}']
        return ready == len(self.replicas) and bool(metrics['quire_route_registry_state{state="ok"}'])


@contextlib.contextmanager
def start_cluster(num_blocks: int, context: int) -> Iterator[Cluster]:
    """All of it ready; a replica has so many KV blocks, and room for a `context` of so many tokens."""
    with tempfile.TemporaryDirectory(prefix="quire-cluster-") as folder, contextlib.ExitStack() as stack:
        model = str(_make_model(Path(folder) / "tiny", context))
        server = RedisServer(Path(folder))
        stack.callback(server.kill)
        proxy = stack.enter_context(contextlib.closing(FaultProxy(server.port)))
        registry = ["--redis-url", proxy.url]
        engine = ["--device", "cpu", "--load-format", "dummy", "--swap-space", "0"]
        engine += ["--num-gpu-blocks-override", str(num_blocks), "--block-size", str(BLOCK_SIZE)]
        ports = [free_port() for _ in range(REPLICAS + 1)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        commands = [["route"], *[["serve", *engine]] * REPLICAS]
        processes = [
            stack.enter_context(_quire(*command, model, "--port", str(port), *registry))
            for command, port in zip(commands, ports, strict=True)
        ]
        for url, process in zip(urls, processes, strict=True):
            _wait(url, process)
        cluster = Cluster(urls[1:], urls[0], ProxiedRedis(server, proxy))
        cluster.wait_until_whole()
        yield cluster


def _make_model(folder: Path, context: int) -> Path:
    """The demo model's shape and tokenizer."""
    shutil.copytree(MODEL_FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_bytes())
    config["max_position_embeddings"] = context
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextlib.contextmanager
def _quire(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command, quiet = [sys.executable, "-m", "service.cli", *arguments], subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"{url}/ready", timeout=5)
            return
        time.sleep(0.1)
    state = "not ready yet" if process.poll() is None else f"gone (exit code {process.returncode})"
    raise RuntimeError(f"{url} is {state}; start the demo model by hand to see why: quire serve")


def _metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = [line.rpartition(" ") for line in str(answer.read(), "utf-8").splitlines()]
    return {name: float(value) for name, _, value in lines if not name.startswith("#")}
