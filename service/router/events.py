"""The events of a stream on their way through."""

from __future__ import annotations

from collections.abc import AsyncIterator


async def whole_events(chunks: AsyncIterator[bytes], mark: bytes) -> AsyncIterator[bytes]:
    """The same bytes, cut only where an event ends, with `mark`.

    So what comes after a stream that broke off is an event of its own, and never part of another one.
    Bytes after the last event's end come last, if the stream ends in order.
    """
    rest = bytearray()
    async for chunk in chunks:
        rest += chunk
        end = rest.rfind(mark) + len(mark)
        if end >= len(mark):
            yield bytes(rest[:end])
            del rest[:end]
    if rest:
        yield bytes(rest)
