"""The events of a stream on their way through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import aiohttp

from quire.service.http.connection import Connection
from quire.service.router.endings import EngineDied, split_at_last, tells_of_death
from quire.service.router.held import Share

_REST_SECONDS = 1.0  # in which the end of a body follows its last event


async def pass_events(
    content: aiohttp.StreamReader,
    connection: Connection,
    mark: bytes,
    share: Share,
    passed: Callable[[bytes], None],
) -> tuple[bytes, bytes]:
    """Pass them on up to the last one, which ends the client's stream, and tell `passed` of them.

    Whatever happens after the last one, to the replica or to the router, is none of the client's business.
    Return the last one; if there was none, no bytes, and then what is left, which is less than an event.
    Raises EngineDied instead of passing on that one of a replica that says so.
    """
    async for events in whole_events(content.iter_any(), mark, share):
        if not events.endswith(mark):
            return b"", events
        before, last = split_at_last(events, mark)
        if last and tells_of_death(last):
            if before:
                await connection.write(before)
            raise EngineDied("its engine died")
        kept = before + last if last else before
        await connection.write(kept, last=bool(last))
        passed(kept)
        if last:
            await _read_rest(content)
            return last, b""
    return b"", b""


async def whole_events(chunks: AsyncIterator[bytes], mark: bytes, share: Share) -> AsyncIterator[bytes]:
    """Yield the same bytes, cut only where an event ends, with `mark`.

    So what comes after a stream that broke off is an event of its own, and never part of another one.
    Bytes after the last event's end come last, if the stream ends in order. What waits for its event's end
    is held in the `share`. Raises ApiError 429 if it is too much beside all others.
    """
    rest = bytearray()
    held = 0
    async for chunk in chunks:
        begin = max(0, len(rest) - len(mark) + 1)  # before which no mark ends anew
        rest += chunk
        end = rest.rfind(mark, begin) + len(mark)
        if end >= len(mark):
            yield bytes(rest[:end])
            del rest[:end]
        share.give_back(held)
        share.take(len(rest))
        held = len(rest)
    if rest:
        yield bytes(rest)


async def _read_rest(content: aiohttp.StreamReader) -> None:
    """Read to the end of a body whose last event is out, so that others can use its connection."""
    with suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with asyncio.timeout(_REST_SECONDS):
            async for _ in content.iter_any():
                pass
