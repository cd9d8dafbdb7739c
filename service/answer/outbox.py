"""The way to one reader: what comes is written at once, or merged while the reader holds up a write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from quire.service.http.connection import ClientGone, Connection
from quire.service.http.eager import start_eagerly


class Source(Protocol):
    """Something that has messages for a reader."""

    @property
    def ended(self) -> bool:
        """Tell whether the messages that it has now are its last."""
        ...

    @property
    def backlog(self) -> int:
        """Return about how many bytes have come and were not taken."""
        ...

    def take(self) -> list[bytes]:
        """Return what has come since, merged."""
        ...


S = TypeVar("S", bound=Source)


class Outbox(Generic[S]):
    """Write what sources have, one source at a time, in the turn of the loop in which it comes.

    No task is woken for that. Only a write that the reader holds up is waited for, in a task of its own; what
    its sources get meanwhile stays with them, up to a limit.
    """

    def __init__(
        self, write: Callable[[S], Coroutine[Any, Any, None]], fail: Callable[[Exception], None], limit: int
    ) -> None:
        """`write` takes what a source has and sends it. `fail` is told how a write ended that was held up.

        limit: bytes, of all sources together, that may wait for the reader.
        """
        self._write = write
        self._fail = fail
        self._limit = limit
        self._waiting: dict[S, None] = {}  # sources that have something, in order
        self._held_up: asyncio.Task[None] | None = None
        self._held_up_since = 0.0
        self._held_up_seconds = 0.0  # before that

    @property
    def is_held_up(self) -> bool:
        """Return whether a write waits for the reader."""
        return self._held_up is not None

    @property
    def held_up_seconds(self) -> float:
        """Return for how long writes have waited for the reader."""
        now = time.monotonic() - self._held_up_since if self._held_up is not None else 0.0
        return self._held_up_seconds + now

    def put(self, source: S) -> None:
        """Have what `source` has written. Raises what `write` does, and ClientGone if too much waits."""
        self._waiting[source] = None
        if self._held_up is not None:
            if sum(each.backlog for each in self._waiting) > self._limit:
                raise ClientGone(f"more than {self._limit} bytes are left unread")
            return
        rest = self._write_waiting()
        if rest is not None:
            self._held_up = asyncio.get_running_loop().create_task(self._go_on(rest))
            self._held_up_since = time.monotonic()

    def _write_waiting(self) -> Awaitable[None] | None:
        """Write until nothing waits, or a write is held up: return its rest."""
        while self._waiting:
            source = next(iter(self._waiting))
            del self._waiting[source]
            rest = start_eagerly(self._write(source))
            if rest is not None:
                return rest
        return None

    async def _go_on(self, rest: Awaitable[None]) -> None:
        held_up: Awaitable[None] | None = rest
        try:
            while held_up is not None:
                await held_up
                held_up = self._write_waiting()
            self._held_up_seconds = self.held_up_seconds
            self._held_up = None
        except Exception as error:
            self._fail(error)

    async def flush(self) -> None:
        """Wait until all that was put is written."""
        if self._held_up is not None:
            await self._held_up

    def close(self) -> None:
        """Give up what is not written."""
        if self._held_up is not None:
            self._held_up.cancel()


def connection_outbox(connection: Connection, limit: int) -> Outbox[Source]:
    """Return the way to the client of one event stream."""

    async def write(source: Source) -> None:
        if connection.interrupted:  # the reason for which is the end of this stream
            return
        last = source.ended
        data = b"".join(source.take())
        if data or last:
            await connection.write(data, last=last)

    return Outbox(write, connection.interrupt, limit)
