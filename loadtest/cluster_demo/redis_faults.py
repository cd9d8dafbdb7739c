"""Do to the registry's Redis what may befall it.

Each fault lasts for a `with`, and sets `over` once Redis is well again, which may be before the end of it.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Event, Timer

from quire.loadtest.servers import fault_proxy
from quire.loadtest.servers.fault_proxy import FaultProxy
from quire.loadtest.servers.redis_server import RedisServer

AWAY_SECONDS = 2.0  # before it starts again; as long as a replica pauses at most between two attempts
MIDST_SECONDS = 0.3
SLOWEST, LEAST_SLOW = 2.0, 0.005  # seconds: some answers come in time


@dataclass(frozen=True)
class ProxiedRedis:
    """`server` is known to others by the proxy's address only."""

    server: RedisServer
    proxy: FaultProxy


Fault = Callable[[ProxiedRedis, Event], AbstractContextManager[None]]


@contextlib.contextmanager
def stopped(redis: ProxiedRedis, over: Event) -> Iterator[None]:
    """Stop Redis: it takes commands and answers none (SIGSTOP)."""
    redis.server.pause()
    try:
        yield
    finally:
        redis.server.resume()
        over.set()


@contextlib.contextmanager
def killed(redis: ProxiedRedis, over: Event) -> Iterator[None]:
    """Kill Redis: it is gone, and every connection with it (SIGKILL)."""
    redis.server.kill()
    try:
        yield
    finally:
        redis.server.start()
        over.set()


@contextlib.contextmanager
def restarted(redis: ProxiedRedis, over: Event) -> Iterator[None]:
    """Restart Redis: it was gone for a while, and has just come back empty."""
    redis.server.kill()
    time.sleep(AWAY_SECONDS)
    redis.server.start()
    over.set()
    yield


@contextlib.contextmanager
def flushed(redis: ProxiedRedis, over: Event) -> Iterator[None]:
    """Flush Redis: it forgets everything from one command to the next (FLUSHALL)."""

    def flush() -> None:
        redis.server.client.flushall()
        over.set()

    timer = Timer(MIDST_SECONDS, flush)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@contextlib.contextmanager
def slow(redis: ProxiedRedis, over: Event) -> Iterator[None]:
    """Delay each answer by 5 ms to 2 s, any order of magnitude as likely as another."""

    def late(data: bytes) -> bytes:
        time.sleep(math.exp(random.uniform(math.log(LEAST_SLOW), math.log(SLOWEST))))
        return data

    with _answers(redis, over, late):
        yield


@contextlib.contextmanager
def lying(redis: ProxiedRedis, over: Event) -> Iterator[None]:
    """Change its answers: bytes of no protocol, wrong numbers, or those to another question."""

    def lie(data: bytes) -> bytes:
        way = random.choice((fault_proxy.garbled, fault_proxy.lying, fault_proxy.nonsense))
        return way(data)

    with _answers(redis, over, lie):
        yield


@contextlib.contextmanager
def _answers(redis: ProxiedRedis, over: Event, change: Callable[[bytes], bytes]) -> Iterator[None]:
    redis.proxy.fault = change
    try:
        yield
    finally:
        redis.proxy.fault = fault_proxy.honest
        over.set()


FAULTS: dict[str, Fault] = {
    "stopped": stopped,
    "killed": killed,
    "restarted": restarted,
    "flushed": flushed,
    "slow": slow,
    "lying": lying,
}
