"""The registry as a router reads it; service.router only ever reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from engine.deployment import Deployment
from engine.prefix_cache import Digest
from engine.registry import ALL_REPLICAS, FAILURES, LOOKUP, REPLICAS, Keys, Load
from engine.urls import check_http_url

MAX_BLOCKS = 4096  # of a prompt, that are looked up
TIMEOUT = 0.015  # seconds for an answer; requests wait for the registry no longer
CONNECT_TIMEOUT = 0.05  # for a connection to become free, and again for one to be made
MAX_CONNECTIONS = 4  # in a burst, TLS handshakes of more would take each other's time, and none would be done


class Registered(msgspec.Struct, frozen=True):
    """What a replica says of itself."""

    url: str
    epoch: str
    seq: int
    parity: str
    deployment: Deployment
    load: Load


class Directory:
    """Methods raise one of engine.registry.FAILURES; `lookup` within TIMEOUT, the others soon."""

    def __init__(self, redis_url: str) -> None:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            redis_url,
            max_connections=MAX_CONNECTIONS,
            timeout=CONNECT_TIMEOUT,
            socket_connect_timeout=CONNECT_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        pool.connection_kwargs["socket_timeout"] = None  # whatever the URL says, see _at_most
        self._pool = pool
        self._client: redis.asyncio.Redis = redis.asyncio.Redis.from_pool(pool)

    async def fingerprints(self) -> set[str]:
        """Of all deployments that anybody is registered in."""
        before, after = ALL_REPLICAS.split("*")  # braces and colons are themselves in Redis' patterns
        found: set[str] = set()
        cursor = 0
        await self._connect()
        while True:
            async with _at_most(TIMEOUT):
                answer: Any = await self._client.scan(cursor, match=ALL_REPLICAS, count=1000)
                cursor, keys = answer
                found.update(key.decode()[len(before) : -len(after)] for key in keys)
            if not cursor:
                return found

    async def registered(self, fingerprint: str) -> list[Registered]:
        """Those whose lease has not ended."""
        keys = Keys(fingerprint)
        await self._connect()
        async with _at_most(TIMEOUT):
            found: Any = await self._client.eval_ro(REPLICAS, 1, keys.replicas, keys.meta)
            return [_registered(fields) for fields in found if fields]

    async def pinned(self, fingerprint: str) -> list[list[int]]:
        """Token ids of the prefixes that all tenants of a deployment share."""
        await self._connect()
        async with _at_most(TIMEOUT):
            (found,) = await self._client.hmget(Keys(fingerprint).pinned, ["tokens"])
            return [] if found is None else msgspec.json.decode(found, type=list[list[int]])

    async def lookup(self, fingerprint: str, digests: Sequence[Digest]) -> dict[str, int]:
        """By URL: how many of a prompt's first blocks each replica holds."""
        keys, asked = Keys(fingerprint), digests[:MAX_BLOCKS]
        async with _at_most(TIMEOUT):  # for a connection, too
            found: Any = await self._client.eval_ro(
                LOOKUP, 1, keys.replicas, keys.meta, keys.blocks, b"".join(asked)
            )
            matches = {url.decode(): int(blocks) for url, blocks in found}
        if any(not 0 <= blocks <= len(asked) for blocks in matches.values()):
            raise ValueError(f"the registry claims that {max(matches.values())} of {len(asked)} blocks match")
        return matches

    async def close(self) -> None:
        with suppress(*FAILURES):  # such as that a connection took long to close, which it does all the same
            await self._client.aclose()

    async def _connect(self) -> None:
        """What is asked next finds a connection, if nobody else takes it.

        A handshake may take a watch longer than a request; an answer may not, or the two would not agree on
        whether the registry is silent.
        """
        async with _at_most(2 * CONNECT_TIMEOUT):
            await self._pool.release(await self._pool.get_connection())


@asynccontextmanager
async def _at_most(seconds: float) -> AsyncIterator[None]:
    """Raises one of FAILURES, whatever is raised within: an answer that is none may break anything, and an
    event loop's errors come through redis-py as they are (uvloop's of a connection that has just been lost is
    a RuntimeError).

    The time is not redis-py's to keep: it has asyncio.wait_for end a write, which in Python 3.11 drops the
    cancellation of a request or a watch that comes as the write is done.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {1000 * seconds:g} ms") from error
    except FAILURES:
        raise
    except Exception as error:
        raise ValueError(f"the registry is lost or not understood: {error!r}") from error


def _registered(fields: list[bytes]) -> Registered:
    """From a hash's names and values in turn."""
    meta = {name.decode(): value for name, value in zip(fields[::2], fields[1::2], strict=True)}
    check_http_url("a registered URL", meta["url"].decode())
    return Registered(
        url=meta["url"].decode(),
        epoch=meta["epoch"].decode(),
        seq=int(meta["seq"]),
        parity=meta["parity"].decode(),
        deployment=msgspec.json.decode(meta["deployment"], type=Deployment),
        load=Load(
            running=int(meta["running"]),
            waiting=int(meta["waiting"]),
            free_blocks=int(meta["free_blocks"]),
            blocks=int(meta["blocks"]),
            draining=meta["draining"] != b"0",
        ),
    )
