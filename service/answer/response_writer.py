"""What writes responses to Redis that memory holds, and lets none hold up those behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from quire.service.answer.redis_responses import FAILURES, UNSURE, RedisResponses, takes_nothing
from quire.service.answer.store_health import RETRY_SECONDS, StoreHealth
from quire.service.answer.stored_responses import ResponseStore, StoredResponse

Key = tuple[str, str]  # tenant and id

_LAST_SECONDS = 2.0  # for which a server that ends writes what is left
_MOST_TRIES = 4  # the first in the line of all, the others with more time
_FEW_NAMES = 64  # of which none is looked for in memory again


class _Line:
    """Responses that are written one after the other."""

    def __init__(self, keep: Callable[[str, str, StoredResponse], Awaitable[None]], pause: float) -> None:
        """pause: seconds after a response that Redis did not take."""
        self.keep = keep
        self.pause = pause
        self.tries: dict[Key, int] = {}  # of each that waits
        self.writing = asyncio.Lock()
        self.task: asyncio.Task[None] | None = None


class ResponseWriter:
    """In the order in which they came.

    A response that Redis does not take though it answers, as one too large for the time that each has, is
    tried a few times more beside the others, with more time, and then stays in memory. While Redis is away
    all wait.
    """

    def __init__(self, memory: ResponseStore, shared: RedisResponses, health: StoreHealth) -> None:
        self._memory = memory
        self._shared = shared
        self._health = health
        self._all = _Line(shared.keep, pause=0)
        self._refused = _Line(shared.keep_slowly, pause=RETRY_SECONDS)
        self.unsure: set[Key] = set()  # in memory, and perhaps in Redis

    def add(self, tenant: str, response_id: str) -> None:
        """Write what memory holds by that name. Call it in the event loop."""
        self._queue(self._all, (tenant, response_id), tries=0)
        names = sum(map(len, (self._all.tries, self._refused.tries, self.unsure)))
        if names > _FEW_NAMES + 4 * len(self._memory):
            self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        """Drop the names of what memory has forgotten: they may be behind one that is not taken for hours."""
        for line in (self._all, self._refused):
            line.tries = {key: tries for key, tries in line.tries.items() if self._memory.has(*key)}
        self.unsure = {key for key in self.unsure if self._memory.has(*key)}

    @contextlib.asynccontextmanager
    async def at_rest(self, key: Key) -> AsyncIterator[None]:
        """Let a response be written before or after, and not meanwhile."""
        async with self._all.writing:  # in which a response moves to those refused
            if key not in self._refused.tries:
                yield
                return
        async with self._refused.writing:
            yield

    async def written(self) -> None:
        """Wait until Redis has all that it takes."""
        while tasks := [task for task in self._tasks() if not task.done()]:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Write what is left, if that does not take long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.written(), _LAST_SECONDS)
        for task in self._tasks():
            task.cancel()

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [line.task for line in (self._all, self._refused) if line.task is not None]

    def _queue(self, line: _Line, key: Key, tries: int) -> None:
        line.tries[key] = tries
        if line.task is None or line.task.done():
            line.task = asyncio.create_task(self._write(line), name="quire-responses")

    async def _write(self, line: _Line) -> None:
        while (key := next(iter(line.tries), None)) is not None:
            async with line.writing:  # or what is deleted could be written after all
                pause = await self._write_one(line, key)
            if pause:
                await asyncio.sleep(pause)

    async def _write_one(self, line: _Line, key: Key) -> float:
        """Write it or let it wait; return the seconds until the next one's turn."""
        response = self._memory.find(*key)
        if response is None:
            line.tries.pop(key, None)
            self.unsure.discard(key)
            return 0
        try:
            await line.keep(*key, response)
        except FAILURES as error:
            if isinstance(error, UNSURE):
                self.unsure.add(key)
            if takes_nothing(error) or not await self._shared.answers():
                self._health.failed(error)
                return RETRY_SECONDS
            self._put_by(line, key, error)
            return line.pause
        line.tries.pop(key, None)
        self._memory.forget(*key)
        self.unsure.discard(key)
        self._health.answered()
        return 0

    def _put_by(self, line: _Line, key: Key, error: Exception) -> None:
        tries = line.tries.pop(key, None)
        self._health.refused()
        if tries is None:  # memory has forgotten it meanwhile
            return
        if tries + 1 < _MOST_TRIES:
            self._queue(self._refused, key, tries + 1)
        else:
            self._health.gave_up(key[1], error)
