"""The processes of a run: a Redis, two replicas of the demo model with little memory, a router, a control."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.loadtest.servers.quire_process import QuireProcess, quire
from quire.loadtest.servers.redis_server import RedisServer
from quire.loadtest.servers.server_process import free_port

KEY = "chaos"  # not a secret: whoever reads this may ask the run's servers
CONTEXT = 384
BLOCKS = 24  # for three or four of the requests at once, so that many are preempted
FLAGS = (
    *("--device", "cpu", "--max-model-len", str(CONTEXT), "--block-size", "16"),
    *("--num-gpu-blocks-override", str(BLOCKS), "--swap-space", "0.0023"),
    *("--max-num-seqs", "24", "--max-num-batched-tokens", "256"),
)
MODES = ("swap", "recompute")  # one way of preemption for each replica


@dataclass(frozen=True)
class Fleet:
    """The second replica is the one that may be restarted."""

    router: QuireProcess
    replicas: tuple[QuireProcess, ...]
    redis: RedisServer
    control: int  # its port

    @property
    def servers(self) -> dict[str, QuireProcess]:
        named = {f"replica {at}": each for at, each in enumerate(self.replicas, 1)}
        return {"router": self.router, **named}


@contextlib.contextmanager
def start_fleet() -> Iterator[Fleet]:
    """Yield all of it, once it is ready."""
    with tempfile.TemporaryDirectory(prefix="quire-chaos-") as folder, contextlib.ExitStack() as stack:
        redis = RedisServer(Path(folder))
        stack.callback(redis.kill)
        registry = ("--redis-url", redis.url)
        secret = {"QUIRE_API_KEY": KEY}
        router = stack.enter_context(quire("route", *registry, port=free_port(), environment=secret))
        replicas = [
            stack.enter_context(
                quire(
                    "serve",
                    *FLAGS,
                    "--preemption-mode",
                    mode,
                    *registry,
                    port=free_port(),
                    environment=secret,
                )
            )
            for mode in MODES
        ]
        control = free_port()
        server = subprocess.Popen([sys.executable, "-m", "quire.loadtest.chaos.control", str(control)])
        stack.callback(server.wait)
        stack.callback(server.kill)
        for process in (*replicas, router):
            process.wait_until_ready()
        yield Fleet(router, tuple(replicas), redis, control)
