"""Two CPU replicas, a Redis and a router on loopback: what knowing where prefixes are cached is worth.

`python -m quire.loadtest.cluster_demo` sends the same kind of work round-robin, straight to the replicas;
through the router; and through the router during each fault of Redis. Turns with a fault and turns without
one follow each other, so that what else the machine does is in both. Tenants come in random order, each with
a long prefix of its own; a replica has KV blocks for little more than half of them. The model has random
weights: only the time that a prompt takes matters.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event

from rich.console import Console

from quire.loadtest.client.driver import drive
from quire.loadtest.client.records import Record
from quire.loadtest.client.sessions import Session, Turn
from quire.loadtest.client.target import Target
from quire.loadtest.cluster_demo.cluster import BLOCK_SIZE, REPLICAS, Cluster, start_cluster
from quire.loadtest.cluster_demo.outcome import (
    FaultOutcome,
    Outcome,
    compare_to_well,
    outcome_of,
    table_of_faults,
    table_of_work,
)
from quire.loadtest.cluster_demo.redis_faults import FAULTS, Fault
from quire.loadtest.command import command_parser, write_json

TOKEN_IDS = range(300, 4000)  # of the demo model's vocabulary, none of them special
TURN = 24  # requests with Redis well, and then as many during a fault of it
SETTLE_SECONDS = 2.0  # by then the router has heard of what the replicas hold and do


@dataclass(frozen=True)
class Work:
    tenants: int
    prefix_tokens: int
    question_tokens: int
    output_tokens: int
    concurrency: int
    rounds: int  # of turns

    @property
    def context(self) -> int:
        return self.prefix_tokens + self.question_tokens + self.output_tokens + 64

    @property
    def num_blocks(self) -> int:
        """Return a replica's blocks: for its half of the prefixes, half a prefix more, and what runs."""
        prefix = self.prefix_tokens / BLOCK_SIZE
        running = self.concurrency * (self.question_tokens + self.output_tokens) / BLOCK_SIZE
        return int(prefix * (self.tenants / REPLICAS + 0.5) + running) + self.concurrency


class Tenants:
    """Each with a prefix of its own, and always with another question."""

    def __init__(self, work: Work, seed: int) -> None:
        self._work = work
        self._rng = random.Random(seed)
        self._prefixes = [self._tokens(work.prefix_tokens) for _ in range(work.tenants)]
        self._due: list[list[int]] = []

    def first(self) -> list[Session]:
        """Return each tenant's first request."""
        return [self._session(prefix) for prefix in self._prefixes]

    def turn(self) -> list[Session]:
        """Return the next requests: all tenants in random order, again and again."""
        while len(self._due) < TURN:
            self._due += self._rng.sample(self._prefixes, self._work.tenants)
        due, self._due = self._due[:TURN], self._due[TURN:]
        return [self._session(prefix) for prefix in due]

    def _session(self, prefix: list[int]) -> Session:
        prompt = prefix + self._tokens(self._work.question_tokens)
        return Session(turns=[Turn(prompt=prompt, output_len=self._work.output_tokens)])

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(TOKEN_IDS, k=count)


async def run(urls: Sequence[str], work: Sequence[Session], concurrency: int) -> list[Record]:
    """Run all sessions, dealt to the servers in turn."""
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


def begin(urls: Sequence[str], tenants: Tenants) -> None:
    """Send each tenant's first request."""
    first = tenants.first()
    time.sleep(SETTLE_SECONDS)
    asyncio.run(run(urls, first, len(first)))
    time.sleep(SETTLE_SECONDS)


def measure_dealt(cluster: Cluster, work: Work) -> Outcome:
    """Measure round-robin, by requests after each tenant's first."""
    tenants = Tenants(work, seed=1)
    begin(cluster.replicas, tenants)
    turns = [asyncio.run(run(cluster.replicas, tenants.turn(), work.concurrency)) for _ in range(work.rounds)]
    return outcome_of([record for turn in turns for record in turn], work.prefix_tokens)


@dataclass
class Faulty:
    """All turns with one fault, and what came of them. Times are seconds."""

    turns: list[list[Record]] = field(default_factory=list)
    lookups: float = 0.0  # what the requests waited for the registry, together
    recoveries: list[float] = field(default_factory=list)


def measure_routed(
    cluster: Cluster, work: Work, faults: Sequence[str]
) -> tuple[Outcome, dict[str, FaultOutcome]]:
    """Measure the router with Redis well, and in turn with that during each fault."""
    tenants, rng = Tenants(work, seed=2), random.Random(3)
    begin([cluster.router], tenants)
    well: list[list[Record]] = []
    faulty = {name: Faulty() for name in faults}
    for _ in range(work.rounds):
        for name in rng.sample(faults, len(faults)):  # in another order each time
            well.append(asyncio.run(run([cluster.router], tenants.turn(), work.concurrency)))
            suffer(cluster, tenants.turn(), work.concurrency, FAULTS[name], faulty[name])
    during = {
        name: compare_to_well(well, each.turns, work.prefix_tokens, each.lookups, each.recoveries)
        for name, each in faulty.items()
    }
    return outcome_of([record for turn in well for record in turn], work.prefix_tokens), during


def suffer(cluster: Cluster, turn: Sequence[Session], concurrency: int, fault: Fault, faulty: Faulty) -> None:
    """Run one turn during a fault, and time the recovery from it."""
    over, before = Event(), cluster.lookup_seconds()
    with ThreadPoolExecutor(1) as pool:
        recovery = pool.submit(cluster.time_recovery, over)
        with fault(cluster.redis, over):
            faulty.turns.append(asyncio.run(run([cluster.router], turn, concurrency)))
            faulty.lookups += cluster.lookup_seconds() - before
        faulty.recoveries.append(recovery.result())


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--prefix-tokens", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8, help=f"each has a turn of {TURN} requests per fault")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="of Redis")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    work = Work(
        tenants=arguments.tenants,
        prefix_tokens=arguments.prefix_tokens,
        question_tokens=32,
        output_tokens=4,
        concurrency=arguments.concurrency,
        rounds=arguments.rounds,
    )
    console = Console(soft_wrap=True)
    console.print(
        f"starting Redis, {REPLICAS} replicas with {work.num_blocks} KV blocks each, and a router ..."
    )
    with start_cluster(work.num_blocks, work.context) as cluster:
        console.print("round-robin ...")
        dealt = measure_dealt(cluster, work)
        console.print("through the router, with Redis well and failing in turns ...")
        routed, faults = measure_routed(cluster, work, arguments.faults)
    title = f"{work.tenants} tenants, prefixes of {work.prefix_tokens} tokens, {REPLICAS} replicas"
    console.print(table_of_work({"round-robin": dealt, "router": routed}, title))
    console.print(table_of_faults(faults))
    sooner = dealt.ttft_p50 / routed.ttft_p50
    console.print(
        f"Through the router, half of the requests had their first token {sooner:.1f} times sooner."
    )
    figures = {"work": asdict(work), "round_robin": asdict(dealt), "router": asdict(routed)}
    by_fault = {name: asdict(each) for name, each in faults.items()}
    write_json(arguments.json, f"{os.cpu_count()} CPU cores", {**figures, "faults": by_fault})


if __name__ == "__main__":
    main()
