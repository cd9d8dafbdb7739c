"""One run: answers alone, then traffic, faults and hostile clients at once, then answers alone again."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

from quire.loadtest.chaos import traffic
from quire.loadtest.chaos.clients import Clients, Outcome, answer_alone
from quire.loadtest.chaos.faults import Accidents, kill_compilers, kill_redis, restart_replica
from quire.loadtest.chaos.fleet import KEY, Fleet
from quire.loadtest.chaos.hostile import Harms, HostileClients, attack
from quire.loadtest.chaos.traffic import Answer
from quire.loadtest.chaos.watch import Holdings, Samples, leaked, look, watch_metrics, watch_processes
from quire.loadtest.client.health_probe import Asked, probe_all
from quire.loadtest.servers.quire_process import QuireProcess

PROBE_SECONDS = 0.04  # between two questions
START_SECONDS = 0.2  # one of two processes does not take two such naps, while the other starts
PROGRESS_SECONDS = 10.0
SETTLE_SECONDS = 60.0  # at most, until nothing is held that was not before
LOOK_SECONDS = 0.5
RETRY_SECONDS = 0.2  # after a failure

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """Times are seconds."""

    seconds: float  # of traffic
    seed: int = 0
    concurrency: int = 10
    restart_every: float = 240.0  # from when the replica is ready to when it is ended again
    attacks: Sequence[str] = ()
    lying: bool = True  # Redis


@dataclass
class Seen:
    """All that a run has shown."""

    alone: dict[Answer, str] = field(default_factory=dict)
    again: dict[Answer, str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    accidents: Accidents = field(default_factory=Accidents)
    harms: Harms = field(default_factory=Harms)
    samples: Samples = field(default_factory=Samples)
    health: dict[str, list[Asked]] = field(default_factory=dict)
    control: list[Asked] = field(default_factory=list)
    before: Holdings | None = None
    after: Holdings | None = None
    begin: float = 0.0  # of the traffic, by time.monotonic
    end: float = 0.0


async def run(fleet: Fleet, plan: Plan, say: Say) -> Seen:
    seen = Seen()
    say("attacking each server once in every quick way, which warms it up ...")
    await asyncio.to_thread(HostileClients(_ports(_steady(fleet)), plan.attacks, plan.seed).run_once)
    say("asking for each greedy answer alone ...")
    seen.alone = await _ask_alone(fleet, "before")
    await asyncio.sleep(LOOK_SECONDS)
    seen.before = await asyncio.to_thread(look, fleet)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        started = [asyncio.wrap_future(pool.submit(time.sleep, START_SECONDS)) for _ in range(2)]
        await asyncio.gather(*started)
        say(f"traffic for {plan.seconds:g} s ...")
        hostile = await _disturb(fleet, plan, seen, pool, say)
        say("asking for each greedy answer alone again ...")
        seen.again = await _ask_alone(fleet, "after")
        say("waiting until the last attacks are over and nothing is held ...")
        seen.harms = await asyncio.wrap_future(hostile)
    seen.after = await _settle(fleet, seen.before)
    return seen


async def _ask_alone(fleet: Fleet, when: str) -> dict[Answer, str]:
    """Ask both replicas; what they do not agree on is no answer. Leave both used in every way."""
    urls = [replica.url for replica in fleet.replicas]

    async def ask_all(url: str) -> dict[Answer, str]:
        found = {}
        for answer in traffic.answers():
            found[answer] = await answer_alone(url, KEY, answer, title=f"alone {when}")
        grammar = next(answer for answer in found if answer[0] == "grammar")
        # Two at once, so that both processes that try out schemas are there.
        await asyncio.gather(*(answer_alone(url, KEY, grammar, f"{when} {at}") for at in range(2)))
        return found

    first, second = await asyncio.gather(*map(ask_all, urls))
    return {answer: text for answer, text in first.items() if second[answer] == text}


def _steady(fleet: Fleet) -> dict[str, QuireProcess]:
    """Return the servers that nobody restarts, by name."""
    return {name: server for name, server in fleet.servers.items() if server is not fleet.replicas[1]}


def _ports(servers: Mapping[str, QuireProcess]) -> dict[str, int]:
    return {name: server.port for name, server in servers.items()}


async def _disturb(
    fleet: Fleet, plan: Plan, seen: Seen, pool: ProcessPoolExecutor, say: Say
) -> Future[Harms]:
    """Run traffic and all that is bad for it, from `seen.begin` to `seen.end`; attacks may go on a little."""
    steady = _steady(fleet)
    clients = Clients(fleet.router.url, KEY)
    seen.begin = time.monotonic()
    probed = [(fleet.control, None), *((server.port, server.pid) for server in steady.values())]
    asked = pool.submit(probe_all, probed, plan.seconds, PROBE_SECONDS)
    hostile = pool.submit(attack, _ports(steady), plan.attacks, plan.seed, plan.seconds)
    with _beside(
        watch_metrics(fleet, seen.samples),
        watch_processes(fleet, seen.samples),
        kill_redis(fleet, seen.accidents, plan.lying),
        restart_replica(fleet, seen.accidents, plan.restart_every),
        kill_compilers(fleet, seen.accidents, plan.seed),
        _report(seen, say),
    ) as others:
        numbers = itertools.count()
        await asyncio.gather(*(_ask_on(clients, plan, numbers, seen) for _ in range(plan.concurrency)))
        seen.end = time.monotonic()
        seen.accidents.failures += [
            f"{task.get_coro().__qualname__}: {task.exception()!r}"  # type: ignore[union-attr]
            for task in others
            if task.done()
        ]
    await asyncio.gather(*others, return_exceptions=True)
    clients.close()
    seen.control, *found = await asyncio.wrap_future(asked)
    seen.health = dict(zip(steady, found, strict=True))
    await asyncio.to_thread(_make_whole, fleet, seen.accidents)
    return hostile


async def _ask_on(clients: Clients, plan: Plan, numbers: Iterator[int], seen: Seen) -> None:
    """Run one client after another, until the time is up."""
    until = seen.begin + plan.seconds
    while time.monotonic() < until:
        outcomes = await clients.perform(traffic.draw(plan.seed, next(numbers)))
        seen.outcomes += outcomes
        if not all(outcome.is_good for outcome in outcomes):
            await asyncio.sleep(RETRY_SECONDS)


def _make_whole(fleet: Fleet, accidents: Accidents) -> None:
    """Wait until both replicas run, and a restart that was under way is over."""
    restarts = accidents.restarts
    deadline = time.monotonic() + SETTLE_SECONDS
    while restarts and restarts[-1].ready == float("inf") and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    accidents.failures += [
        f"{name} has ended with {server.exit_code}"
        for name, server in fleet.servers.items()
        if server.exit_code is not None
    ]


async def _settle(fleet: Fleet, before: Holdings) -> Holdings:
    """Return what is held once it is no more than before, or after a while."""
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        after = await asyncio.to_thread(look, fleet)
        if not any(leaked(before, after).values()) or time.monotonic() > until:
            return after
        await asyncio.sleep(LOOK_SECONDS)


async def _report(seen: Seen, say: Say) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        ends = Counter(outcome.end for outcome in seen.outcomes)
        told = ", ".join(f"{count} {end}" for end, count in ends.most_common(4))
        say(f"{told}; {len(seen.accidents.restarts)} restarts")


@contextmanager
def _beside(*work: Coroutine[Any, Any, None]) -> Iterator[list[asyncio.Task[None]]]:
    """Run tasks that go on until the end of the block."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
