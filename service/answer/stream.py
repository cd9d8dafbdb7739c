"""Answers a generation, at once or as a stream, for as long as there is a client to answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.service.answer.choice import Choice
from quire.service.answer.encoder import EventEncoder
from quire.service.answer.generation import Generation
from quire.service.config import ServiceConfig
from quire.service.errors import ApiError
from quire.service.http.cancellation import Interruptible
from quire.service.http.codec import JsonResponse, error_response
from quire.service.http.connection import ClientGone, Connection
from quire.service.http.gate import note_failure

log = logging.getLogger("quire.service")

INLINE_LOGPROBS = 1024  # so many are made into a reply in the time of a trip to another thread, or a few


class GenerationResponse(Response):
    """Owns the generation: whatever happens, it is closed.

    A stream's headers go out with its first chunk (or comment), so that what fails earlier is an HTTP status.
    """

    def __init__(
        self,
        config: ServiceConfig,
        working: set[Interruptible],
        pool: Executor,
        generation: Generation,
        *,
        reply: Callable[[], msgspec.Struct],
        events: EventEncoder | None,
    ) -> None:
        """It is in `working` for as long as a drain should wait for it; large replies are made in `pool`."""
        self._config = config
        self._working = working
        self._pool = pool
        self._generation = generation
        self._reply = reply
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(scope, send, self._config)
        self._working.add(connection)
        error = None
        try:
            async with connection:
                if self._events is not None:
                    await _Stream(self._generation, self._events, self._config.max_backlog_bytes).run(
                        connection
                    )
                    return
                await self._generation.complete()
                reply = await self._make_reply()
        except ClientGone as gone:
            log.info("request aborted: %s", gone)
            return
        except ApiError as failure:
            error = failure
        except Exception:
            log.exception("a request failed")
            error = ApiError(500, "internal error", code="internal_error")
        finally:
            self._generation.close()
            self._working.discard(connection)
        if error is None:
            await reply(scope, receive, send)
            return
        note_failure(scope, error, self._generation.engine_requests)
        if connection.started and self._events is not None:
            await connection.finish_late(self._events.failure(error))
        else:
            await error_response(error)(scope, receive, send)

    async def _make_reply(self) -> JsonResponse:
        """In another thread, so that streams go on, if it may take long."""
        if self._generation.options.num_logprobs <= INLINE_LOGPROBS:
            return JsonResponse(self._reply())
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: JsonResponse(self._reply()))


class _Stream:
    """Chunks as the outputs come, each made and written right where its token arrives: that wakes no task.

    Only a write that the client holds up is waited for. What comes meanwhile is merged, up to a limit.
    """

    def __init__(self, generation: Generation, events: EventEncoder, limit: int) -> None:
        self._generation = generation
        self._events = events
        self._limit = limit  # bytes
        self._pending: dict[int, Choice] = {}  # choices that have something to send
        self._write: Coroutine[Any, Any, None] | None = None  # the one that is held up
        self._ended = False  # the last one has begun
        self._failure: Exception | None = None
        self._wake = asyncio.Event()  # there is something to wait for, to raise or to finish

    async def run(self, connection: Connection) -> None:
        self._connection = connection
        connection.keep_alive()
        self._generation.listen(self._arrive)
        try:
            while not self._ended or self._write is not None or self._failure is not None:
                await self._wake.wait()
                self._wake.clear()
                await self._catch_up()
        finally:
            self._generation.listen(_ignore)
            if self._write is not None:
                self._write.close()

    def _arrive(self) -> None:
        if self._connection.interrupted:  # the reason is this stream's end
            return
        try:
            choices = self._generation.take()
            if self._write is None:
                self._send(choices)
            else:
                self._pending.update({choice.index: choice for choice in choices})
                if self._generation.backlog > self._limit:
                    self._connection.interrupt(ClientGone(f"more than {self._limit} bytes are left unread"))
        except Exception as error:
            self._failure = error
        if self._failure is not None or self._write is not None or self._generation.finished:
            self._wake.set()

    def _send(self, choices: Iterable[Choice]) -> None:
        data = b"".join([self._events.chunk(choice) for choice in choices])
        if self._generation.finished:
            self._ended = True
            self._write = self._connection.finish_now(data + self._events.end())
        elif data:
            self._generation.backlog = 0
            self._write = self._connection.write_now(data)

    async def _catch_up(self) -> None:
        if self._failure is not None:
            raise self._failure
        while self._write is not None:
            await self._write
            self._write = None
            if not self._ended:
                pending, self._pending = self._pending, {}
                self._send(pending.values())


def _ignore() -> None:
    """What comes after the end of a stream."""
