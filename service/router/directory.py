"""The registry as a router reads it; service.router only ever reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from engine.deployment import Deployment
from engine.prefix_cache import Digest
from engine.registry import ALL_REPLICAS, CONNECT_TIMEOUT, LOOKUP, REPLICAS, SOCKET_TIMEOUT, Keys, Load
from engine.urls import check_http_url

MAX_BLOCKS = 4096  # of a prompt, that are looked up


class Registered(msgspec.Struct, frozen=True):
    """What a replica says of itself."""

    url: str
    epoch: str
    seq: int
    parity: str
    deployment: Deployment
    load: Load


class Directory:
    """Methods raise one of engine.registry.FAILURES within a few tens of ms."""

    def __init__(self, redis_url: str) -> None:
        self._client: redis.asyncio.Redis = redis.asyncio.Redis.from_url(
            redis_url,
            socket_timeout=SOCKET_TIMEOUT,
            socket_connect_timeout=CONNECT_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )

    async def fingerprints(self) -> set[str]:
        """Of all deployments that anybody is registered in."""
        before, after = ALL_REPLICAS.split("*")
        # Braces and colons are themselves in Redis' patterns.
        keys = [key.decode() async for key in self._client.scan_iter(match=ALL_REPLICAS, count=1000)]
        return {key[len(before) : -len(after)] for key in keys}

    async def registered(self, fingerprint: str) -> list[Registered]:
        """Those whose lease has not ended."""
        keys = Keys(fingerprint)
        found: Any = await self._client.eval_ro(REPLICAS, 1, keys.replicas, keys.meta)
        try:
            return [_registered(fields) for fields in found if fields]
        except (AttributeError, KeyError, TypeError, msgspec.MsgspecError) as error:
            raise ValueError(f"the registry's answer is not understood: {error!r}") from None

    async def pinned(self, fingerprint: str) -> list[list[int]]:
        """Token ids of the prefixes that all tenants of a deployment share."""
        (found,) = await self._client.hmget(Keys(fingerprint).pinned, ["tokens"])
        return [] if found is None else msgspec.json.decode(found, type=list[list[int]])

    async def lookup(self, fingerprint: str, digests: Sequence[Digest]) -> dict[str, int]:
        """By URL: how many of a prompt's first blocks each replica holds."""
        keys, asked = Keys(fingerprint), digests[:MAX_BLOCKS]
        found: Any = await self._client.eval_ro(
            LOOKUP, 1, keys.replicas, keys.meta, keys.blocks, b"".join(asked)
        )
        try:
            matches = {url.decode(): int(blocks) for url, blocks in found}
        except (AttributeError, TypeError) as error:
            raise ValueError(f"the registry's answer is not understood: {error!r}") from None
        if any(not 0 <= blocks <= len(asked) for blocks in matches.values()):
            raise ValueError(f"the registry claims that {max(matches.values())} of {len(asked)} blocks match")
        return matches

    async def close(self) -> None:
        await self._client.aclose()


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
