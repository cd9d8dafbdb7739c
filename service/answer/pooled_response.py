"""Answers a request for vectors, for as long as there is a client to answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.service.answer.pooled import PooledPrompts
from quire.service.answer.stream import failure_of
from quire.service.config import ServiceConfig
from quire.service.explain.spans import server_timing
from quire.service.http.access_line import note_cost, note_failure
from quire.service.http.cancellation import Interruptible
from quire.service.http.connection import Connection

INLINE_BYTES = 64 << 10  # of vectors that are made into a reply in the time of a trip to another thread


class PooledResponse(Response):
    """Owns the prompts: whatever happens, they are closed."""

    def __init__(
        self,
        config: ServiceConfig,
        working: set[Interruptible],
        pool: Executor,
        prompts: PooledPrompts,
        reply: Callable[[list[bytes]], msgspec.Struct],
    ) -> None:
        """It is in `working` for as long as a drain should wait for it; large replies are made in `pool`."""
        self._config = config
        self._working = working
        self._pool = pool
        self._prompts = prompts
        self._reply = reply
        self._made: Response | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(scope, send, self._config)
        self._working.add(connection)
        try:
            error = await failure_of(connection, self._make())
        finally:
            self._prompts.close()
            self._working.discard(connection)
            note_cost(scope, self._prompts.cost())
        if error is not None:
            note_failure(scope, error, self._prompts.engine_requests)
            await connection.fail(error, b"")
        elif self._made is not None:
            self._made.headers["server-timing"] = server_timing(self._prompts.times)
            await self._made(scope, receive, send)
            self._prompts.times.ended = time.monotonic()

    async def _make(self) -> None:
        vectors = await self._prompts.complete()

        def made() -> bytes:
            return msgspec.json.encode(self._reply(vectors))

        if sum(map(len, vectors)) <= INLINE_BYTES:
            content = made()
        else:
            content = await asyncio.get_running_loop().run_in_executor(self._pool, made)
        self._made = Response(content, media_type="application/json")
