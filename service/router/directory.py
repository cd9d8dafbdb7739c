"""The registry as a router reads it; quire.service.router only ever reads."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

import msgspec
import redis
import redis.asyncio
from msgspec import Meta
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from quire.engine.config import BLOCK_SIZES
from quire.engine.hashing import Digest
from quire.engine.registry.deployment import Deployment
from quire.engine.registry.redis import ALL_REPLICAS, FAILURES, LOOKUP, REPLICAS, Keys, Load
from quire.service.router.allowed import host_of
from quire.service.router.complaints import Complaints

MAX_BLOCKS = 4096  # of a prompt, that are looked up
TIMEOUT = 0.015  # seconds for an answer; requests wait for the registry no longer
CONNECT_TIMEOUT = 0.05  # for a connection to become free, and again for one to be made
MAX_DEPLOYMENTS = 256  # of whatever models, that a look finds
MAX_PINNED_BYTES = 4 << 20
MAX_CONNECTIONS = 4  # in a burst, TLS handshakes of more would take each other's time, and none would be done

_SCAN_KEYS = 1000  # at a time
_MAX_SCANS = 4096  # of a look
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_WORD = re.compile(rb"[\x21-\x7e]{1,64}")
_NUMBER = re.compile(rb"[0-9]{1,15}")
_MOST = (1 << 31) - 1  # sequences, or blocks
FIELDS = (
    "url",
    "epoch",
    "seq",
    "parity",
    "deployment",
    "running",
    "waiting",
    "free_blocks",
    "blocks",
    "draining",
)

_pinned = msgspec.json.Decoder(list[list[Annotated[int, Meta(ge=0, le=_MOST)]]])


class Registered(msgspec.Struct, frozen=True):
    """A replica, as it describes itself."""

    url: str
    epoch: str
    seq: int
    parity: str
    deployment: Deployment
    load: Load


class Directory:
    """Methods raise one of quire.engine.registry.redis.FAILURES; `lookup` within TIMEOUT, the others soon."""

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
        self._complaints = Complaints()
        self._pool = pool
        self._client: redis.asyncio.Redis = redis.asyncio.Redis.from_pool(pool)

    async def fingerprints(self) -> set[str]:
        """Return the deployments that anybody is registered in; all of them, unless they are very many."""
        found: set[str] = set()
        cursor = 0
        await self._connect()
        for _ in range(_MAX_SCANS):
            async with _at_most(TIMEOUT):
                answer: Any = await self._client.scan(cursor, match=ALL_REPLICAS, count=_SCAN_KEYS)
                cursor, keys = answer
                found.update(filter(None, map(_fingerprint, keys)))
            if not cursor or len(found) >= MAX_DEPLOYMENTS:
                break
        return found

    async def registered(self, fingerprint: str) -> list[Registered]:
        """Return those whose lease has not ended. An entry that makes no sense is left out, and logged."""
        keys = Keys(fingerprint)
        await self._connect()
        async with _at_most(TIMEOUT):
            found: Any = await self._client.eval_ro(REPLICAS, 1, keys.replicas, keys.meta, *FIELDS)
            entries = [(name, values) for name, *values in found]
        registered = []
        for name, values in entries:
            try:
                if any(value is not None for value in values) or not values:  # else its lease has just ended
                    registered.append(_registered(values))
            except Exception as error:  # whatever is there
                about = f"the registry's entry {name!r} is left out: {error!r}"
                self._complaints.make(logging.WARNING, f"{fingerprint} {name!r}", about)
        return registered

    async def pinned(self, fingerprint: str) -> list[list[int]]:
        """Return the token ids of the prefixes that all tenants of a deployment share."""
        await self._connect()
        async with _at_most(TIMEOUT):
            (found,) = await self._client.hmget(Keys(fingerprint).pinned, ["tokens"])
            if found is not None and len(found) > MAX_PINNED_BYTES:
                raise ValueError(f"the registry's pinned prefixes have more than {MAX_PINNED_BYTES} bytes")
            return [] if found is None else _pinned.decode(found)

    async def lookup(self, fingerprint: str, digests: Sequence[Digest]) -> dict[str, int]:
        """Return by URL how many of a prompt's first blocks each replica holds."""
        keys, asked = Keys(fingerprint), digests[:MAX_BLOCKS]
        async with _at_most(TIMEOUT):  # for a connection, too
            found: Any = await self._client.eval_ro(
                LOOKUP, 1, keys.replicas, keys.meta, keys.blocks, b"".join(asked)
            )
            # What is no URL is no replica's.
            matches = {url.decode(errors="replace"): int(blocks) for url, blocks in found}
        if any(not 0 <= blocks <= len(asked) for blocks in matches.values()):
            raise ValueError(f"the registry claims that {max(matches.values())} of {len(asked)} blocks match")
        return matches

    async def close(self) -> None:
        with suppress(*FAILURES):  # such as that a connection took long to close, which it does all the same
            await self._client.aclose()

    async def _connect(self) -> None:
        """Leave a connection to whoever asks next, if nobody else takes it.

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


def _fingerprint(key: bytes) -> str | None:
    """Return the fingerprint in the key of a deployment's replicas; None for one that only looks like it."""
    before, after = ALL_REPLICAS.split("*")  # braces and colons are themselves in Redis' patterns
    found = key.decode(errors="replace")[len(before) : -len(after)]
    return found if _FINGERPRINT.fullmatch(found) else None


def _registered(values: Sequence[bytes | None]) -> Registered:
    """Return the replica of these values of FIELDS. Raises whatever comes of values that make no sense."""
    if not values:
        raise ValueError("it is of another type, or too large")
    missing = [name for name, value in zip(FIELDS, values, strict=True) if value is None]
    if missing:
        raise ValueError(f"it has no {missing[0]}")
    meta = {name: value or b"" for name, value in zip(FIELDS, values, strict=True)}
    url = meta["url"].decode()
    if host_of(url) is None:
        raise ValueError(f"{url!r} is no URL of a replica")
    deployment = msgspec.json.decode(meta["deployment"], type=Deployment)
    if deployment.block_size not in BLOCK_SIZES:
        raise ValueError(f"its block_size is {deployment.block_size}, and may be one of {BLOCK_SIZES}")
    return Registered(
        url=url,
        epoch=_word("epoch", meta["epoch"]),
        seq=_number("seq", meta["seq"], 10**15),
        parity=_word("parity", meta["parity"]),
        deployment=deployment,
        load=Load(
            running=_number("running", meta["running"], _MOST),
            waiting=_number("waiting", meta["waiting"], _MOST),
            free_blocks=_number("free_blocks", meta["free_blocks"], _MOST),
            blocks=_number("blocks", meta["blocks"], _MOST),
            draining=meta["draining"] != b"0",
        ),
    )


def _number(name: str, value: bytes, most: int) -> int:
    if not _NUMBER.fullmatch(value) or int(value) > most:
        raise ValueError(f"its {name} must be a number of at most {most}, got {value[:40]!r}")
    return int(value)


def _word(name: str, value: bytes) -> str:
    if not _WORD.fullmatch(value):
        raise ValueError(f"its {name} must be a word of at most 64 letters, got {value[:80]!r}")
    return value.decode()
