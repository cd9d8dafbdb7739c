"""The pools that visitors of /blocks/lab play with: each its own, few at once, gone when nobody uses them."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.service.errors import ApiError
from quire.service.shares import Shares

if TYPE_CHECKING:
    from quire.engine.lab.pool import Pool

NUM_BLOCKS = 64
MAX_POOLS = 64
MAX_SEQUENCES = 64  # of a pool
IDLE_SECONDS = 600.0


@dataclass
class _Visit:
    tenant: str
    pool: Pool
    idle: asyncio.TimerHandle


class LabPools:
    """By an id that nobody guesses. When there are too many, whoever has most loses the longest unused."""

    def __init__(self, max_pools: int = MAX_POOLS, idle_seconds: float = IDLE_SECONDS) -> None:
        self._max_pools = max_pools
        self._idle_seconds = idle_seconds
        self._visits: dict[str, _Visit] = {}
        self._shares: Shares[str] = Shares()

    def __len__(self) -> int:
        return len(self._visits)

    def begin(self, tenant: str, block_size: int) -> tuple[str, Pool]:
        """Return a new pool and its id."""
        while len(self._visits) >= self._max_pools:
            oldest = self._shares.next_to_go(lambda _: False)
            assert oldest is not None, "pools without shares"
            self._forget(oldest[1])
        pool_id, pool = secrets.token_hex(16), _new_pool(block_size)
        self._visits[pool_id] = _Visit(tenant, pool, self._timer(pool_id))
        self._shares.add(tenant, pool_id, 1)
        return pool_id, pool

    def find(self, tenant: str, pool_id: str) -> Pool:
        """Return a pool of `tenant`, which is used now. Raises ApiError 404."""
        visit = self._visits.get(pool_id)
        if visit is None or visit.tenant != tenant:
            raise ApiError(
                404,
                f"there is no pool {pool_id!r}: it was not used for {self._idle_seconds:g} s, made room for "
                "others, or the server has started anew; begin another",
                param="pool_id",
                code="pool_not_found",
            )
        visit.idle.cancel()
        visit.idle = self._timer(pool_id)
        self._shares.use(tenant, pool_id)
        return visit.pool

    def reset(self, tenant: str, pool_id: str, block_size: int) -> Pool:
        """Return a new pool in place of the one of this id. Raises ApiError 404."""
        self.find(tenant, pool_id)
        pool = self._visits[pool_id].pool = _new_pool(block_size)
        return pool

    def leave(self, tenant: str, pool_id: str) -> Pool:
        """Forget a pool; return it. Raises ApiError 404."""
        pool = self.find(tenant, pool_id)
        self._forget(pool_id)
        return pool

    def close(self) -> None:
        for pool_id in list(self._visits):
            self._forget(pool_id)

    def _timer(self, pool_id: str) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._idle_seconds, self._forget, pool_id)

    def _forget(self, pool_id: str) -> None:
        visit = self._visits.pop(pool_id)
        visit.idle.cancel()
        self._shares.remove(visit.tenant, pool_id)


def _new_pool(block_size: int) -> Pool:
    from quire.engine.lab.pool import Pool  # a server listens before it has imported the engine's parts

    return Pool(NUM_BLOCKS, block_size)
