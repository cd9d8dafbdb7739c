"""A stream that outlives its connections: it is generated into a ring, from which one client reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.service.answer.encoder import EventEncoder
from quire.service.answer.generation import Generation
from quire.service.answer.outbox import connection_outbox
from quire.service.answer.resumption.ring import EventRing
from quire.service.answer.stream import AnswerEvents, failure_of, stream
from quire.service.errors import ApiError
from quire.service.http.access_line import Cost
from quire.service.http.cancellation import Interruptible
from quire.service.http.connection import ClientGone, Connection


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
        self._done = asyncio.Event()  # `run` has ended
        self._reader: _Reader | None = None
        self._timer = self._loop.call_later(patience, self._give_up)
        self.early_error: ApiError | None = None  # before the first event, so that it can be a status
        self.cost: Cost | None = None  # once the generation has ended
        self.failure: tuple[ApiError, list[int]] | None = None  # with the numbers of the engine's requests
        self.ring = EventRing(max_bytes)
        self.ended = False  # its last event is there
        self.over = False

    @property
    def is_read(self) -> bool:
        return self._reader is not None

    async def run(self, generation: Generation, encoder: EventEncoder) -> None:
        """Closes the generation. An interruption is the reason why it fails."""

        def record(messages: list[bytes], last: bool) -> None:
            tokens = sum(choice.num_tokens for choice in generation.choices)
            for message in messages:
                self.ring.add(tokens, message)
            if last:
                self.ended = True
            self._tell_reader()

        def take(events: AnswerEvents) -> None:
            last = events.ended
            record(events.take(), last)

        self._working.add(self)
        try:
            error = await failure_of(self, stream(generation, encoder, take))
            if error is not None:
                self.failure = (error, generation.engine_requests)
                if self.ring.end == 0:
                    self.early_error = error
                record(encoder.failure(error), last=True)
            elif not self.ended:  # nobody came back for it
                record([], last=True)
        finally:
            generation.close()
            self.cost = generation.cost()
        self._done.set()
        if self._reader is None:
            self._working.discard(self)
        self._on_end(self)

    def interrupt(self, reason: Exception) -> None:
        """End it with `reason`, unless its last event is there."""
        if not self.ended:
            super().interrupt(reason)

    def stop(self) -> bool:
        """End it for the client, unless its last event is there. Return whether it had to be ended."""
        if self.ended:
            return False
        self.interrupt(ApiError(409, "this stream was stopped by a DELETE", code="stream_stopped"))
        return True

    def _tell_reader(self) -> None:
        reader = self._reader
        if reader is not None:
            try:
                reader.tell()
            except Exception as error:
                reader.connection.interrupt(error)

    def _give_up(self) -> None:
        self.over = True
        self.interrupt(ClientGone(f"nobody came back for the stream within {self._patience:g} s"))
        self._on_over(self)

    async def read(self, connection: Connection, number: int) -> None:
        """Write the events from `number` on. Whoever read before is told to leave.

        Raises ApiError if the stream is over, or if it failed before its first event, so that a client that
        has been sent nothing yet can get a status.
        """
        connection.keep_alive()
        reader = _Reader(self, connection, number)
        self._attach(reader)
        try:
            reader.tell()
            await self._done.wait()
            await reader.outbox.flush()
        finally:
            reader.outbox.close()
            self._detach(reader)

    def _attach(self, reader: _Reader) -> None:
        if self.over:
            raise ApiError(404, "the stream has just been forgotten", code="stream_not_found")
        self._timer.cancel()
        if self._reader is not None:
            taken = ApiError(409, "this stream is read by another connection now", code="stream_taken_over")
            self._reader.connection.interrupt(taken)
        self._reader = reader

    def _detach(self, reader: _Reader) -> None:
        if self._reader is not reader:
            return
        self._reader = None
        self._timer = self._loop.call_later(self._patience, self._give_up)
        if self.ended:
            self._working.discard(self)


class _Reader:
    """The events of a recording from `number` on, for one connection: a Source."""

    backlog = 0  # what it has not been sent yet is in the ring, which has a limit

    def __init__(self, recording: Recording, connection: Connection, number: int) -> None:
        self._recording = recording
        self._number = number
        self.connection = connection
        self.outbox = connection_outbox(connection, 0)

    @property
    def ended(self) -> bool:
        return self._recording.ended

    def tell(self) -> None:
        self.outbox.put(self)

    def take(self) -> list[bytes]:
        events = self._recording.ring.since(self._number)
        if events is None:
            raise ClientGone("the client left more unread than is kept of its stream")
        if self._recording.early_error is not None and not self.connection.started:
            raise self._recording.early_error
        self._number += len(events)
        return events
