"""Accidents of a run, by a clock: Redis killed and lying, replicas killed and restarted, compilers killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import redis

from quire.engine.registry.deployment import Deployment
from quire.engine.registry.redis import ALL_REPLICAS, Keys
from quire.loadtest.chaos.fleet import Fleet
from quire.loadtest.chaos.processes import children
from quire.loadtest.servers.quire_process import QuireProcess

REDIS_SECONDS = 5.0  # between two kills
AWAY_SECONDS = 1.0
LIE_SECONDS = 1.5  # after a start: replicas have told of themselves by then
COMPILER_SECONDS = 7.0
DRAIN_SECONDS = 40.0  # a little more than --shutdown-timeout
LEASE_MS = 15_000


@dataclass
class Restart:
    """One restart, by `time.monotonic`; `ready` is infinite until it is."""

    how: str
    begin: float
    ready: float = float("inf")


@dataclass
class Accidents:
    """All that has befallen the fleet."""

    restarts: list[Restart] = field(default_factory=list)
    redis_kills: int = 0
    lies: int = 0
    compilers_killed: int = 0
    failures: list[str] = field(default_factory=list)  # of the fleet to stand them


async def kill_redis(fleet: Fleet, accidents: Accidents, lying: bool) -> None:
    """Kill Redis again and again. With `lying`, it soon says of a deployment that its blocks are empty."""
    due = time.monotonic()
    while True:
        due += REDIS_SECONDS
        await asyncio.sleep(due - time.monotonic())
        fleet.redis.kill()
        accidents.redis_kills += 1
        try:
            await asyncio.sleep(AWAY_SECONDS)
        finally:
            await asyncio.to_thread(fleet.redis.start)
        if lying:
            await asyncio.sleep(LIE_SECONDS)
            accidents.lies += lie(fleet.redis.client)


def lie(client: redis.Redis) -> bool:
    """Register a deployment like the one that is there, but for a block size of 0; False: nobody is there."""
    with contextlib.suppress(redis.RedisError):
        for replicas in client.scan_iter(match=ALL_REPLICAS):
            for key in client.scan_iter(match=replicas[: -len(b"replicas")] + b"meta:*"):
                fields: dict[Any, Any] = client.hgetall(key)
                true = msgspec.json.decode(fields[b"deployment"], type=Deployment)
                false = msgspec.structs.replace(true, block_size=0)
                if false == true:
                    continue
                keys = Keys(false.fingerprint)
                fields[b"deployment"] = msgspec.json.encode(false)
                client.hset(f"{keys.meta}liar", mapping=fields)
                client.zadd(keys.replicas, {"liar": int(1000 * time.time()) + LEASE_MS})
                return True
    return False


async def restart_replica(fleet: Fleet, accidents: Accidents, every: float) -> None:
    """Kill the second replica and tell it to end, in turn, and start it again each time."""
    replica = fleet.replicas[1]
    while True:
        for number in (signal.SIGKILL, signal.SIGTERM):
            await asyncio.sleep(every)
            accidents.restarts.append(Restart(signal.Signals(number).name, time.monotonic()))
            # To its end, whoever is cancelled: a run ends with two replicas.
            await asyncio.shield(asyncio.to_thread(_restart, replica, number, accidents))


def _restart(replica: QuireProcess, number: int, accidents: Accidents) -> None:
    replica.signal(number)
    code = replica.wait(DRAIN_SECONDS)
    if code != (-number if number == signal.SIGKILL else 0):
        accidents.failures.append(f"a replica ended with {code} after {signal.Signals(number).name}")
    replica.start()
    replica.wait_until_ready()
    accidents.restarts[-1].ready = time.monotonic()


async def kill_compilers(fleet: Fleet, accidents: Accidents, seed: int) -> None:
    """Kill the processes in which the first replica tries out schemas."""
    rng = random.Random(seed)
    while True:
        await asyncio.sleep(COMPILER_SECONDS)
        compilers = children(fleet.replicas[0].pid, "grammar_compiler")
        if compilers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(compilers), signal.SIGKILL)
                accidents.compilers_killed += 1
