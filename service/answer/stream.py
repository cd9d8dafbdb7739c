"""Answers a generation, at once or as a stream, for as long as there is a client to answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.service.answer.choice import Choice
from quire.service.answer.encoder import EventEncoder
from quire.service.answer.generation import Generation
from quire.service.answer.outbox import connection_outbox
from quire.service.answer.pooled import PooledPrompts
from quire.service.config import ServiceConfig
from quire.service.errors import ApiError
from quire.service.explain.spans import server_timing
from quire.service.http.access_line import note_cost, note_failure
from quire.service.http.cancellation import Interruptible
from quire.service.http.connection import ClientGone, Connection

log = logging.getLogger("quire.service")

INLINE_LOGPROBS = 1024  # so many are made into a reply in the time of a trip to another thread, or a few


class AnswerEvents:
    """The messages of one generation: a Source. They are made when they are taken: what waits is merged."""

    def __init__(self, generation: Generation, encoder: EventEncoder) -> None:
        self._generation = generation
        self._encoder = encoder
        self._choices: dict[int, Choice] = {}  # that have something new

    @property
    def ended(self) -> bool:
        return self._generation.finished

    @property
    def backlog(self) -> int:
        return self._generation.backlog

    def add(self, choices: list[Choice]) -> None:
        self._choices.update({choice.index: choice for choice in choices})

    def take(self) -> list[bytes]:
        choices, self._choices = self._choices, {}
        self._generation.backlog = 0
        messages = [message for choice in choices.values() for message in self._encoder.chunk(choice)]
        return [*messages, *self._encoder.end()] if self.ended else messages


async def stream(generation: Generation, encoder: EventEncoder, tell: Callable[[AnswerEvents], None]) -> None:
    """Have `tell` called whenever there are events to take, until the last. Raises as the generation does."""
    events = AnswerEvents(generation, encoder)

    def add(choices: list[Choice]) -> None:
        events.add(choices)
        tell(events)

    await generation.complete(add)


async def failure_of(work: Interruptible, steps: Coroutine[Any, Any, None]) -> ApiError | None:
    """Do the `steps` of `work`. Return how it failed, if there is a client to tell."""
    try:
        async with work:
            await steps
    except ClientGone as gone:
        log.info("request aborted: %s", gone)
    except ApiError as error:
        return error
    except Exception:
        log.exception("a request failed")
        return ApiError(500, "internal error", code="internal_error")
    finally:
        steps.close()  # they do not begin if the work was interrupted before
    return None


async def encoded_reply(reply: Callable[[], msgspec.Struct], pool: Executor, *, takes_long: bool) -> bytes:
    """Return the reply as JSON: made in another thread, so that streams go on, if that takes long."""
    if not takes_long:
        return msgspec.json.encode(reply())
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(pool, lambda: msgspec.json.encode(reply()))


async def whole(generation: Generation, reply: Callable[[], msgspec.Struct], pool: Executor) -> bytes:
    """Wait for a generation's end; return its reply."""
    await generation.complete()
    takes_long = generation.options.num_logprobs > INLINE_LOGPROBS
    return await encoded_reply(reply, pool, takes_long=takes_long)


async def send_stream(
    connection: Connection, generation: Generation, encoder: EventEncoder, max_backlog_bytes: int
) -> None:
    """Write the events as they come; those that the client leaves unread may be so many bytes."""
    connection.keep_alive()
    outbox = connection_outbox(connection, max_backlog_bytes)
    try:
        await stream(generation, encoder, outbox.put)
        if outbox.is_held_up:
            generation.times.unread_since = time.monotonic()
        await outbox.flush()
    finally:
        generation.times.unread_seconds = outbox.held_up_seconds
        outbox.close()


class GenerationResponse(Response):
    """Owns the generation: whatever happens, it is closed.

    A stream's headers go out with its first chunk (or comment), so that what fails earlier is an HTTP status.
    """

    def __init__(
        self,
        config: ServiceConfig,
        working: set[Interruptible],
        generation: Generation | PooledPrompts,
        steps: Callable[[Connection], Awaitable[bytes | None]],
        events: EventEncoder | None = None,
    ) -> None:
        """It is in `working` for as long as a drain should wait for it.

        `steps` return the reply, or write it as `events` and return nothing.
        """
        self._config = config
        self._working = working
        self._generation = generation
        self._steps = steps
        self._events = events
        self._reply: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(scope, send, self._config)
        self._working.add(connection)
        try:
            error = await failure_of(connection, self._answer(connection))
        finally:
            self._generation.close()
            self._working.discard(connection)
            note_cost(scope, self._generation.cost())
        if error is not None:
            note_failure(scope, error, self._generation.engine_requests)
            last = self._events.failure(error) if self._events is not None and connection.started else []
            await connection.fail(error, b"".join(last))
        elif self._reply is not None:
            response = Response(self._reply, media_type="application/json")
            response.headers["server-timing"] = server_timing(self._generation.times)
            await response(scope, receive, send)
            self._generation.times.ended = time.monotonic()

    async def _answer(self, connection: Connection) -> None:
        self._reply = await self._steps(connection)
