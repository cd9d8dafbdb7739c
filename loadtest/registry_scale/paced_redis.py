"""A real Redis behind the registry's own code; on virtual time each command takes what was measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import redis
import redis.asyncio

from quire.engine.config import RegistryConfig
from quire.engine.hashing import Digest
from quire.engine.registry.deployment import Deployment
from quire.engine.registry.redis import LOOKUP, TIMEOUT, Answer, Load, Registry
from quire.loadtest.registry_scale.costs import RedisCosts
from quire.service.router.directory import MAX_CONNECTIONS, Directory

_DIGEST_BYTES = 16


@dataclass(slots=True)
class Asked:
    """What a Redis was asked, and the microseconds of its one thread that this takes."""

    publications: int = 0
    changes: int = 0  # digests that were added or removed
    lookups: int = 0
    lookup_us: float = 0.0
    us: float = 0.0

    def since(self, before: Asked) -> Asked:
        return Asked(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(Asked)))


class RedisThread:
    """The one thread of a Redis, which does everything in the order in which it is asked."""

    def __init__(self, costs: RedisCosts, clock: Callable[[], float]) -> None:
        self.asked = Asked()
        self._costs = costs
        self._clock = clock
        self._free_at = 0.0

    def publish(self, changes: int) -> float:
        """Return the seconds until a publication is answered."""
        self.asked.publications += 1
        self.asked.changes += changes
        return self._take(self._costs.publishing(1, changes))

    def read(self, command: Sequence[Any], answer: Any) -> float:
        """Return the seconds until a router's command is answered."""
        if command[0] != "EVAL_RO":
            return self._take(self._costs.lookup_us)
        if command[1] != LOOKUP:
            return self._take(self._costs.listing(len(answer)))
        held = sum(1 for _, blocks in answer if blocks)
        us = self._costs.looking_up(len(answer), held, len(command[-1]) // _DIGEST_BYTES)
        self.asked.lookups += 1
        self.asked.lookup_us += us
        return self._take(us)

    def rest(self) -> None:
        """Forget what is still to be done."""
        self._free_at = self._clock()

    def _take(self, us: float) -> float:
        now = self._clock()
        self.asked.us += us
        self._free_at = max(now, self._free_at) + us / 1e6
        return self._free_at - now


class PacedRegistry(Registry):
    """A replica's place in the registry. An answer that would come too late does not come."""

    def __init__(
        self, thread: RedisThread, config: RegistryConfig, deployment: Deployment, parity: str, epoch: str
    ) -> None:
        super().__init__(config, deployment, [], parity, epoch)
        self._thread = thread

    def publish(
        self,
        seq: int,
        added: list[Digest],
        removed: list[Digest],
        load: Load,
        *,
        anew: bool = False,
        whole: bool = True,
    ) -> Answer:
        answer = super().publish(seq, added, removed, load, anew=anew, whole=whole)
        if self._thread.publish(len(added) + len(removed)) > TIMEOUT:
            raise redis.TimeoutError(f"no answer within {TIMEOUT} s")
        return answer


class PacedDirectory(Directory):
    """The registry as a router reads it, which waits for answers on the loop's virtual time."""

    def __init__(self, redis_url: str, thread: RedisThread) -> None:
        super().__init__(redis_url)
        self._client = _PacedClient(redis_url, thread)

    async def _connect(self) -> None:
        """There is nothing to connect: the client has its connection."""


class _PacedClient(redis.asyncio.Redis):
    """Asks the real Redis at once, and gives its answer when the thread would have got to it."""

    def __init__(self, redis_url: str, thread: RedisThread) -> None:
        super().__init__()
        self._real = redis.Redis.from_url(redis_url, protocol=2)
        self._thread = thread
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        async with self._free:
            answer = self._real.execute_command(*args, **options)
            await asyncio.sleep(self._thread.read(args, answer))
            return answer

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        self._real.close()
