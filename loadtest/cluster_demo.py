"""Two CPU replicas, a Redis and a router on loopback: what knowing where prefixes are cached is worth.

`python -m loadtest.cluster_demo` sends the same work twice: round-robin, straight to the replicas, and
through the router. Tenants come in random order, each with a long prefix of its own; a replica has KV blocks
for little more than half of them. The model has random weights: only the time that a prompt takes matters.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


def sessions(work: Work, seed: int) -> tuple[list[Session], list[Session]]:
    """Each tenant's first request, and then the requests that are measured."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return rng.choices(TOKEN_IDS, k=count)

    def session(prefix: list[int]) -> Session:
        prompt = prefix + tokens(work.question_tokens)
        return Session(turns=[Turn(prompt=prompt, output_len=work.output_tokens)])

    prefixes = [tokens(work.prefix_tokens) for _ in range(work.tenants)]
    rounds = -(-work.requests // work.tenants)
    order = [prefix for _ in range(rounds) for prefix in rng.sample(prefixes, len(prefixes))]
    return [session(prefix) for prefix in prefixes], [session(prefix) for prefix in order[: work.requests]]


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


def measure(urls: Sequence[str], work: Work, seed: int) -> list[Record]:
    first, rest = sessions(work, seed)
    time.sleep(SETTLE_SECONDS)
    asyncio.run(run(urls, first, len(first)))  # all at once, so that they are spread evenly
    time.sleep(SETTLE_SECONDS)
    return asyncio.run(run(urls, rest, work.concurrency))


# -- the processes -----------------------------------------------------------------------------------


@contextlib.contextmanager
def cluster(work: Work) -> Iterator[tuple[list[str], str]]:
    """URLs of the replicas and of the router, all ready."""
    with tempfile.TemporaryDirectory(prefix="quire-cluster-") as folder, contextlib.ExitStack() as stack:
        model = str(_make_model(Path(folder) / "tiny", work))
        redis = _free_port()
        options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]
        stack.enter_context(_process("redis-server", "--port", str(redis), *options))
        registry = ["--redis-url", f"redis://127.0.0.1:{redis}/0"]
        engine = ["--device", "cpu", "--load-format", "dummy", "--swap-space", "0"]
        engine += ["--num-gpu-blocks-override", str(work.num_blocks), "--block-size", str(BLOCK_SIZE)]
        ports = [_free_port() for _ in range(REPLICAS + 1)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for port in ports[1:]:
            stack.enter_context(_quire("serve", model, "--port", str(port), *engine, *registry))
        stack.enter_context(_quire("route", model, "--port", str(ports[0]), *registry))
        for url in urls:
            _wait(url)
        ready = f'quire_route_replicas{{state="ready"}} {REPLICAS:.1f}'
        while ready not in urllib.request.urlopen(f"{urls[0]}/metrics").read().decode():
            time.sleep(0.1)
        yield urls[1:], urls[0]


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
def _process(*command: str) -> Iterator[None]:
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _quire(*arguments: str) -> contextlib.AbstractContextManager[None]:
    return _process(sys.executable, "-m", "service.cli", *arguments)


def _wait(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"{url}/ready", timeout=5)
            return
        time.sleep(0.1)
    raise RuntimeError(f"{url} was not ready within {START_SECONDS:.0f} s; start it by hand to see why")


# -- what comes out ----------------------------------------------------------------------------------


def show(console: Console, results: dict[str, list[Record]], work: Work) -> None:
    table = Table(
        title=f"{work.tenants} tenants, prefixes of {work.prefix_tokens} tokens, {REPLICAS} replicas"
    )
    for heading in ("", "requests", "failed", "prefix hits", "TTFT p50", "TTFT p90"):
        table.add_column(heading, justify="right")
    for name, records in results.items():
        good = [record for record in records if not record.failure]
        hits = sum(record.cached_tokens >= 0.95 * work.prefix_tokens for record in good) / len(good)
        deciles = statistics.quantiles([record.ttft for record in good], n=10)
        table.add_row(
            name,
            str(len(records)),
            str(len(records) - len(good)),
            f"{hits:.1%}",
            f"{deciles[4] * 1e3:,.0f} ms",
            f"{deciles[8] * 1e3:,.0f} ms",
        )
    console.print(table)
    plain, routed = (
        statistics.median(record.ttft for record in records if not record.failure)
        for records in results.values()
    )
    console.print(f"Half of the requests had their first token {plain / routed:.1f} times sooner.")


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
    console = Console()
    console.print(
        f"starting Redis, {REPLICAS} replicas with {work.num_blocks} KV blocks each, and a router ..."
    )
    with cluster(work) as (replicas, router):
        console.print("round-robin ...")
        results = {"round-robin": measure(replicas, work, seed=1)}
        console.print("through the router ...")
        results["router"] = measure([router], work, seed=2)
    show(console, results, work)


if __name__ == "__main__":
    main()
