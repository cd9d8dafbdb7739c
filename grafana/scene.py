"""A server under load with a Prometheus beside it, both on loopback: what panels are drawn from."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana.dashboard import PATH as DASHBOARD
from quire.loadtest.servers.server_process import free_port

ROOT = Path(__file__).parents[1]
RULES = DASHBOARD.with_name("rules.yaml")
# Few enough blocks that requests push each other out, and a host tier to be pushed to.
SMALL = ("--device", "cpu", "--num-gpu-blocks-override", "64", "--swap-space", "0.01", "--max-num-seqs", "16")
SECONDS = 120  # that starting may take on a busy machine

VARIABLES = {"$__rate_interval": "10s", "$job": ".+", "$instance": ".+"}  # Grafana's, for all servers

Sample = tuple[dict[str, str], float]


def expression(expr: str) -> str:
    """Of a panel, as Grafana would send it."""
    for variable, text in VARIABLES.items():
        expr = expr.replace(variable, text)
    return expr


def fetch(url: str, body: object = None, timeout: float = SECONDS) -> bytes:
    """Raises OSError for a refusal too."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return bytes(reply.read())


@contextlib.contextmanager
def running(command: Sequence[str | Path], ready: Callable[[], object]) -> Iterator[subprocess.Popen[bytes]]:
    """The process, once `ready` raises no OSError; ended by SIGTERM. RuntimeError: it ended before."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    silent = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=silent, stderr=silent) as process:
        try:
            until = time.monotonic() + SECONDS
            while True:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(
                        f"{' '.join(map(str, command))} did not get ready ({process.returncode})"
                    )
                with contextlib.suppress(OSError):
                    ready()
                    break
                time.sleep(0.1)
            yield process
        finally:
            process.terminate()
            process.wait(SECONDS)


@contextlib.contextmanager
def quire(command: str, *flags: str) -> Iterator[str]:
    """The URL of `quire serve` or `quire route`, of the demo model."""
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    program = [sys.executable, "-m", "quire.cli", command, "--port", port]
    with running([*program, *flags], lambda: fetch(f"{url}/ready", timeout=5)):
        yield url


@contextlib.contextmanager
def redis(*options: str | Path) -> Iterator[str]:
    """Host and port of a Redis that keeps nothing."""
    port = free_port()
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    with running([*command, *options], lambda: socket.create_connection(("127.0.0.1", port)).close()):
        yield f"127.0.0.1:{port}"


@dataclass(frozen=True)
class Prometheus:
    url: str

    def query(self, expr: str) -> list[Sample]:
        """Raises RuntimeError for an expression that is wrong."""
        return [(result["metric"], float(result["value"][1])) for result in self._ask("query", query=expr)]

    def query_range(self, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Series with `metric` and `values`, pairs of a time and a number as text."""
        return self._ask("query_range", query=expr, start=start, end=end, step=step)

    def _ask(self, what: str, **parameters: str | float) -> list[dict[str, Any]]:
        try:
            reply = fetch(f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}")
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from None
        return list(json.loads(reply)["data"]["result"])


@contextlib.contextmanager
def prometheus(
    folder: Path, targets: dict[str, Sequence[str]], interval: str, labels: dict[str, str]
) -> Iterator[Prometheus]:
    """Scrapes and evaluates the rules every `interval`. `targets`: URLs by job; `labels` are for all."""

    def hosts(urls: Sequence[str]) -> list[str]:
        return [url.removeprefix("http://") for url in urls]

    jobs = [
        {"job_name": job, "static_configs": [{"targets": hosts(urls), "labels": labels}]}
        for job, urls in targets.items()
    ]
    configuration = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(RULES)],
        "scrape_configs": jobs,
    }
    file = folder / "prometheus.json"  # JSON is YAML
    file.write_text(json.dumps(configuration))
    url = f"http://127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    listening = f"--web.listen-address={url.removeprefix('http://')}"
    with running([*command, listening], lambda: fetch(f"{url}/-/ready", timeout=5)):
        yield Prometheus(url)


class Load:
    """Tenants whose prompts begin alike, some asking for several samples; more than fits at once."""

    def __init__(self, url: str, *, clients: int, tenants: int = 4) -> None:
        self._url = url
        self._model = json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"]
        prompts = [f"Tenant {i} asks about blocks, tables and pages. " for i in range(tenants)]
        self._prefixes = [prompt * (1 + i) for i, prompt in enumerate(prompts)]
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._clients = clients

    def __enter__(self) -> Load:
        self._asking = [self._pool.submit(self._ask, seed) for seed in range(self._clients)]
        return self

    def __exit__(self, *_: object) -> None:
        """Raises what went wrong with a request."""
        self._over.set()
        self._pool.shutdown()
        for asking in self._asking:
            asking.result()

    def _ask(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._over.is_set():
            body = {
                "model": self._model,
                "prompt": draw.choice(self._prefixes) + f"Question {draw.random()}?",
                "max_tokens": draw.randint(48, 160),
                "n": draw.choice((1, 1, 1, 3)),
                "ignore_eos": True,
            }
            fetch(f"{self._url}/v1/completions", body)
