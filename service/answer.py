"""Answers a generation, at once or as a stream, for as long as there is a client to answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.choice import Choice
from service.connection import ClientGone, Connection
from service.errors import ApiError
from service.generation import Generation
from service.http import JsonResponse, error_response
from service.state import ServerState

log = logging.getLogger("quire.service")


class EventEncoder(Protocol):
    """The events of a stream, as bytes."""

    def chunk(self, choice: Choice) -> bytes:
        """What has come for `choice` and is not yet sent; empty if nothing can be shown."""
        ...

    def end(self) -> bytes:
        """What follows when every choice has finished."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that has begun and cannot go on."""
        ...


class GenerationResponse(Response):
    """Owns the generation: whatever happens, it is closed.

    A stream's headers go out with its first chunk (or comment), so that what fails earlier is an HTTP status.
    """

    def __init__(
        self,
        state: ServerState,
        generation: Generation,
        *,
        reply: Callable[[], msgspec.Struct],
        events: EventEncoder | None,
    ) -> None:
        """Streams `events`, or without them sends `reply()` at the end."""
        self._state = state
        self._generation = generation
        self._reply = reply
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(scope, receive, send, self._state.config)
        self._state.generations.add(connection)
        error = None
        try:
            async with connection:
                if self._events is not None:
                    await _Stream(self._generation, self._events, self._state).run(connection)
                    return
                while not self._generation.finished:
                    await self._generation.advance()
                reply = JsonResponse(self._reply())
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
            self._state.generations.discard(connection)
        if error is None:
            await reply(scope, receive, send)
        elif connection.started and self._events is not None:
            await connection.finish_late(self._events.failure(error))
        else:
            await error_response(error)(scope, receive, send)


class _Stream:
    """Chunks as the outputs come. While a write is blocked they are merged, up to a limit."""

    def __init__(self, generation: Generation, events: EventEncoder, state: ServerState) -> None:
        self._generation = generation
        self._events = events
        self._limit = state.config.max_backlog_bytes
        self._pending: dict[int, Choice] = {}  # choices that have something to send
        self._collector: asyncio.Task[None] | None = None

    async def run(self, connection: Connection) -> None:
        generation = self._generation
        connection.on_blocked = lambda: self._start_collecting(connection)
        connection.keep_alive()
        try:
            while self._pending or not generation.finished:
                if self._pending:
                    data = self._take_pending()
                else:
                    data = b"".join([self._events.chunk(choice) for choice in await generation.advance()])
                if data:
                    generation.backlog = 0
                    await connection.write(data)
                    if self._collector is not None:
                        await self._stop_collecting()
            await connection.finish(self._events.end())
        finally:
            if self._collector is not None:
                self._collector.cancel()

    def _take_pending(self) -> bytes:
        pending, self._pending = self._pending, {}
        return b"".join([self._events.chunk(choice) for choice in pending.values()])

    def _start_collecting(self, connection: Connection) -> None:
        if self._collector is None:
            self._collector = asyncio.get_running_loop().create_task(self._collect(connection))

    async def _collect(self, connection: Connection) -> None:
        while not self._generation.finished:
            self._pending.update({choice.index: choice for choice in await self._generation.advance()})
            if self._generation.backlog > self._limit:
                connection.interrupt(ClientGone(f"the client left more than {self._limit} bytes unread"))
                return

    async def _stop_collecting(self) -> None:
        collector, self._collector = self._collector, None
        if collector is None:
            return
        collector.cancel()
        await asyncio.wait([collector])
        if not collector.cancelled():
            collector.result()
