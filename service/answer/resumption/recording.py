"""A stream that outlives its connections: it is generated into a ring, from which one client reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from quire.service.answer.encoder import EventEncoder
from quire.service.answer.generation import Generation
from quire.service.answer.resumption.ring import EventRing
from quire.service.errors import ApiError
from quire.service.http.cancellation import Interruptible
from quire.service.http.connection import ClientGone, Connection

log = logging.getLogger("quire.service")


class Recording(Interruptible):
    """`run` generates, until the end or until it was without a reader for `patience` seconds."""

    def __init__(
        self,
        max_bytes: int,
        patience: float,
        working: set[Interruptible],
        on_end: Callable[[Recording], None],
        on_over: Callable[[Recording], None],
    ) -> None:
        """It is in `working` while there is something to generate or somebody to tell.

        `on_end` is called when there is no more to come, `on_over` when it is to be forgotten.
        """
        super().__init__()
        self._patience = patience
        self._working = working
        self._on_end = on_end
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._reader: Connection | None = None
        self._timer = self._loop.call_later(patience, self._give_up)
        self._error: ApiError | None = None  # before the first event, so that it can be a status
        self.failure: tuple[ApiError, list[int]] | None = None  # with the numbers of the engine's requests
        self.ring = EventRing(max_bytes)
        self.ended = False
        self.over = False

    @property
    def is_read(self) -> bool:
        return self._reader is not None

    async def run(self, generation: Generation, encoder: EventEncoder) -> None:
        """Closes the generation. An interruption is the reason why it fails."""
        self._working.add(self)
        try:
            with self.working():
                while not generation.finished:
                    for choice in await generation.advance():
                        self._add(encoder.chunk(choice), generation)
            self._add(encoder.end(), generation)
        except ClientGone as gone:
            log.info("request aborted: %s", gone)
        except ApiError as error:
            self._fail(error, encoder, generation)
        except Exception:
            log.exception("a request failed")
            self._fail(ApiError(500, "internal error", code="internal_error"), encoder, generation)
        finally:
            generation.close()
        self.ended = True
        self._news.set()
        if self._reader is None:
            self._working.discard(self)
        self._on_end(self)

    def _add(self, data: bytes, generation: Generation) -> None:
        tokens = sum(choice.num_tokens for choice in generation.choices)
        for event in data.split(b"\n\n")[:-1]:
            self.ring.add(tokens, event + b"\n\n")
        self._news.set()

    def _fail(self, error: ApiError, encoder: EventEncoder, generation: Generation) -> None:
        self.failure = (error, generation.engine_requests)
        if self.ring.end == 0:
            self._error = error
        self._add(encoder.failure(error), generation)

    def _give_up(self) -> None:
        self.over = True
        self.interrupt(ClientGone(f"nobody came back for the stream within {self._patience:g} s"))
        self._on_over(self)

    async def read(self, connection: Connection, number: int) -> None:
        """Writes the events from `number` on. Whoever read before is told to leave.

        Raises ApiError if the stream is over, or if it failed before its first event, so that a client that
        has been sent nothing yet can get a status.
        """
        self._attach(connection)
        try:
            while True:
                events = self.ring.since(number)
                if events is None:
                    raise ClientGone("the client left more unread than is kept of its stream")
                if self._error is not None and not connection.started:
                    raise self._error
                if events:
                    number += len(events)
                    await connection.write(b"".join(events))
                elif self.ended:
                    break
                else:
                    self._news.clear()
                    await self._news.wait()
            await connection.finish()
        finally:
            self._detach(connection)

    def _attach(self, connection: Connection) -> None:
        if self.over:
            raise ApiError(404, "the stream has just been forgotten", code="stream_not_found")
        self._timer.cancel()
        if self._reader is not None:
            taken = ApiError(409, "this stream is read by another connection now", code="stream_taken_over")
            self._reader.interrupt(taken)
        self._reader = connection

    def _detach(self, connection: Connection) -> None:
        if self._reader is not connection:
            return
        self._reader = None
        self._timer = self._loop.call_later(self._patience, self._give_up)
        if self.ended:
            self._working.discard(self)
