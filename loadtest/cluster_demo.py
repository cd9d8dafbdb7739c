"""Two CPU replicas, a Redis and a router on loopback: what knowing where prefixes are cached is worth.

`python -m loadtest.cluster_demo` sends the same kind of work three times: round-robin, straight to the
replicas; through the router; and through the router while Redis is stopped, so that it takes commands and
answers nothing. Tenants come in random order, each with a long prefix of its own; a replica has
KV blocks for little more than half of them. The model has random weights: only the time that a prompt takes
matters.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.driver import drive
from loadtest.records import Record
from loadtest.sessions import Session, Turn
from loadtest.target import Target
from service.demo import MODEL_FOLDER

REPLICAS = 2
BLOCK_SIZE = 16
TOKEN_IDS = range(300, 4000)  # of the demo model's vocabulary, none of them special
TURN = 24  # requests between two faults of Redis
HIT = 0.95  # of a prefix: so much of it must be cached
START_SECONDS = 120.0
SETTLE_SECONDS = 2.0  # by then the router has heard of what the replicas hold and do


@dataclass(frozen=True)
class Work:
    tenants: int
    prefix_tokens: int
    question_tokens: int
    output_tokens: int
    requests: int
    concurrency: int

    @property
    def num_blocks(self) -> int:
        """Of a replica: for its half of the prefixes, half a prefix more, and what runs."""
        prefix = self.prefix_tokens / BLOCK_SIZE
        running = self.concurrency * (self.question_tokens + self.output_tokens) / BLOCK_SIZE
        return int(prefix * (self.tenants / REPLICAS + 0.5) + running) + self.concurrency


class Tenants:
    """Each with a prefix of its own, and always with another question."""

    def __init__(self, work: Work, seed: int) -> None:
        self._work = work
        self._rng = random.Random(seed)
        self._prefixes = [self._tokens(work.prefix_tokens) for _ in range(work.tenants)]

    def first(self) -> list[Session]:
        """Of each."""
        return [self._session(prefix) for prefix in self._prefixes]

    def more(self) -> list[Session]:
        """The requests that are measured: all tenants in random order, again and again."""
        rounds = -(-self._work.requests // self._work.tenants)
        order = [
            prefix for _ in range(rounds) for prefix in self._rng.sample(self._prefixes, self._work.tenants)
        ]
        return [self._session(prefix) for prefix in order[: self._work.requests]]

    def _session(self, prefix: list[int]) -> Session:
        prompt = prefix + self._tokens(self._work.question_tokens)
        return Session(turns=[Turn(prompt=prompt, output_len=self._work.output_tokens)])

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(TOKEN_IDS, k=count)


async def run(urls: Sequence[str], work: Sequence[Session], concurrency: int) -> list[Record]:
    """All sessions, dealt to the servers in turn."""
    start = time.monotonic()
    drives = [
        drive(
            Target(base_url=url, model="tiny"),
            "",
            list(enumerate(work))[i :: len(urls)],
            max(1, concurrency // len(urls)),
            start,
            lambda _: None,
        )
        for i, url in enumerate(urls)
    ]
    return [record for records in await asyncio.gather(*drives) for record in records]


def measure(urls: Sequence[str], tenants: Tenants, work: Work) -> list[Record]:
    """Those after each tenant's first."""
    begin(urls, tenants)
    return asyncio.run(run(urls, tenants.more(), work.concurrency))


def begin(urls: Sequence[str], tenants: Tenants) -> None:
    """Each tenant's first request."""
    first = tenants.first()
    time.sleep(SETTLE_SECONDS)
    asyncio.run(run(urls, first, len(first)))
    time.sleep(SETTLE_SECONDS)


@dataclass
class Turns:
    """With Redis and without. Times are seconds."""

    running: list[Record] = field(default_factory=list)
    stopped: list[Record] = field(default_factory=list)
    running_lookups: float = 0.0  # what the requests waited for the registry, together
    stopped_lookups: float = 0.0
    recoveries: list[float] = field(default_factory=list)  # from its going on until all is published again


def measure_router(cluster: Cluster, tenants: Tenants, work: Work) -> Turns:
    """Redis runs and is stopped in turns, so that what else the machine does is in both."""
    begin([cluster.router], tenants)
    turns, with_redis, without = Turns(), tenants.more(), tenants.more()
    for at in range(0, work.requests, TURN):
        before = cluster.lookup_seconds()
        turns.running += asyncio.run(run([cluster.router], with_redis[at : at + TURN], work.concurrency))
        between = cluster.lookup_seconds()
        os.kill(cluster.redis, signal.SIGSTOP)
        try:
            turns.stopped += asyncio.run(run([cluster.router], without[at : at + TURN], work.concurrency))
        finally:
            os.kill(cluster.redis, signal.SIGCONT)
        turns.running_lookups += between - before
        turns.stopped_lookups += cluster.lookup_seconds() - between
        resumed = time.monotonic()
        cluster.wait_until_published()
        turns.recoveries.append(time.monotonic() - resumed)
    return turns


# -- the processes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    replicas: list[str]
    router: str
    redis: int  # process id

    def wait_until_published(self) -> None:
        """For the registry to hold all, and for the router to read it."""
        for url in self.replicas:
            _wait_for(url, 'quire_registry_state{state="ok"} 1.0')
        _wait_for(self.router, 'quire_route_registry_state{state="ok"} 1.0')
        _wait_for(self.router, f'quire_route_replicas{{state="ready"}} {len(self.replicas):.1f}')

    def lookup_seconds(self) -> float:
        """What all requests so far have waited for the registry."""
        lines = _metrics(self.router).splitlines()
        name = "quire_route_lookup_seconds_sum "
        return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@contextlib.contextmanager
def start_cluster(work: Work) -> Iterator[Cluster]:
    """All of it ready."""
    with tempfile.TemporaryDirectory(prefix="quire-cluster-") as folder, contextlib.ExitStack() as stack:
        model = str(_make_model(Path(folder) / "tiny", work))
        port = _free_port()
        options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]
        redis = stack.enter_context(_process("redis-server", "--port", str(port), *options))
        registry = ["--redis-url", f"redis://127.0.0.1:{port}/0"]
        engine = ["--device", "cpu", "--load-format", "dummy", "--swap-space", "0"]
        engine += ["--num-gpu-blocks-override", str(work.num_blocks), "--block-size", str(BLOCK_SIZE)]
        ports = [_free_port() for _ in range(REPLICAS + 1)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        commands = [["route"], *[["serve", *engine]] * REPLICAS]
        processes = [
            stack.enter_context(_quire(*command, model, "--port", str(port), *registry))
            for command, port in zip(commands, ports, strict=True)
        ]
        for url, process in zip(urls, processes, strict=True):
            _wait(url, process)
        cluster = Cluster(urls[1:], urls[0], redis.pid)
        cluster.wait_until_published()
        yield cluster


def _make_model(folder: Path, work: Work) -> Path:
    """The demo model's shape and tokenizer, with a context for the prefixes."""
    shutil.copytree(MODEL_FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_bytes())
    config["max_position_embeddings"] = work.prefix_tokens + work.question_tokens + work.output_tokens + 64
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    quiet = subprocess.DEVNULL
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


def _quire(*arguments: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    return _process(sys.executable, "-m", "service.cli", *arguments)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"{url}/ready", timeout=5)
            return
        time.sleep(0.1)
    state = "not ready yet" if process.poll() is None else f"gone (exit code {process.returncode})"
    raise RuntimeError(f"{url} is {state}; start the demo model by hand to see why: quire serve")


def _metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return str(answer.read(), "utf-8")


def _wait_for(url: str, metric: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while metric not in _metrics(url):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{url}/metrics did not say {metric} within {START_SECONDS:.0f} s")
        time.sleep(0.05)


# -- what comes out ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    requests: int
    failed: int
    hits: float  # the share of requests that found their prefix
    ttft: list[float]  # seconds, of those that did not fail

    def percentile(self, percent: int) -> float:
        """TTFT in ms."""
        return statistics.quantiles(self.ttft, n=100, method="inclusive")[percent - 1] * 1e3


def outcome(records: Sequence[Record], work: Work) -> Outcome:
    good = [record for record in records if not record.failure]
    hits = sum(record.cached_tokens >= HIT * work.prefix_tokens for record in good) / len(good)
    return Outcome(len(records), len(records) - len(good), hits, [record.ttft for record in good])


def show(console: Console, outcomes: dict[str, Outcome], work: Work) -> None:
    table = Table(
        title=f"{work.tenants} tenants, prefixes of {work.prefix_tokens} tokens, {REPLICAS} replicas"
    )
    table.add_column("", no_wrap=True)
    for heading in ("requests", "failed", "prefix hits", "TTFT: p50", "p90", "p99 [ms]"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, each in outcomes.items():
        times = [f"{each.percentile(percent):,.0f}" for percent in (50, 90, 99)]
        table.add_row(name, str(each.requests), str(each.failed), f"{each.hits:.1%}", *times)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.cluster_demo", description=__doc__)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--prefix-tokens", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=2)
    arguments = parser.parse_args()
    work = Work(
        tenants=arguments.tenants,
        prefix_tokens=arguments.prefix_tokens,
        question_tokens=32,
        output_tokens=4,
        requests=arguments.requests,
        concurrency=arguments.concurrency,
    )
    console = Console(soft_wrap=True)
    console.print(
        f"starting Redis, {REPLICAS} replicas with {work.num_blocks} KV blocks each, and a router ..."
    )
    with start_cluster(work) as cluster:
        console.print("round-robin ...")
        dealt = outcome(measure(cluster.replicas, Tenants(work, seed=1), work), work)
        console.print("through the router, with Redis and with Redis stopped in turns ...")
        turns = measure_router(cluster, Tenants(work, seed=2), work)
    routed, stopped = outcome(turns.running, work), outcome(turns.stopped, work)
    show(console, {"round-robin": dealt, "router": routed, "no Redis": stopped}, work)
    sooner = dealt.percentile(50) / routed.percentile(50)
    later = [stopped.percentile(percent) - routed.percentile(percent) for percent in (50, 99)]
    console.print(
        f"Through the router, half of the requests had their first token {sooner:.1f} times sooner."
    )
    console.print(f"Redis stopped: TTFT p50 {later[0]:+.0f} ms, p99 {later[1]:+.0f} ms.")
    waits = [1e3 * seconds / work.requests for seconds in (turns.running_lookups, turns.stopped_lookups)]
    console.print(
        f"A request waited {waits[0]:.1f} ms for the registry, {waits[1]:.1f} ms with Redis stopped."
    )
    console.print(f"At most {max(turns.recoveries):.1f} s after Redis went on, the registry was whole again.")


if __name__ == "__main__":
    main()
