"""One `response.create` of a WebSocket, from the request to its last event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from starlette.requests import HTTPConnection

from quire.service.answer.conversations import Conversations
from quire.service.answer.history import History
from quire.service.answer.stream import failure_of
from quire.service.api.responses.events import ResponseEvents, error_event
from quire.service.api.responses.protocol import ResponseCreate
from quire.service.api.responses.response import ModelResponse, begin
from quire.service.api.responses.writer import Event
from quire.service.api.sockets.failures import Cancelled, log_failure
from quire.service.errors import ApiError
from quire.service.http.cancellation import Interruptible
from quire.service.state import ServerState


class SocketResponse(Interruptible):
    """`run` generates; `take` gives the events, of which the last comes once: text that waits is merged."""

    def __init__(
        self,
        state: ServerState,
        connection: HTTPConnection,
        body: ResponseCreate,
        conversations: Conversations,
        on_news: Callable[[SocketResponse], None],
    ) -> None:
        """`on_news` is called when there is something to take."""
        super().__init__()
        self._state = state
        self._connection = connection
        self._body = body
        self._conversations = conversations
        self._on_news = on_news
        self._response: ModelResponse | None = None
        self._events: ResponseEvents | None = None
        self._due: list[Event] = []
        self.ended = False  # its last event is due, or was taken

    @property
    def id(self) -> str | None:
        """Return the id; None before the engine has it."""
        return None if self._response is None else self._response.id

    @property
    def stream_id(self) -> str | None:
        return self._body.stream_id

    @property
    def backlog(self) -> int:
        return 0 if self._response is None else self._response.generation.backlog

    async def run(self, before: Sequence[asyncio.Task[None]]) -> None:
        """Wait for `before`, then generate. Interrupt it with Cancelled or another ApiError."""
        self._state.generations.add(self)
        try:
            error = await failure_of(self, self._generate(before))
            if isinstance(error, Cancelled) and self._response is not None and self._events is not None:
                finished = self._response.choice.finish_reason is not None  # just before it was cancelled
                self._end(self._events.finish() if finished else self._events.cancelled())
            elif error is not None:
                self._fail(error)
        finally:
            if self._response is not None:
                self._response.generation.close()
        self.ended = True
        self._on_news(self)

    async def _generate(self, before: Sequence[asyncio.Task[None]]) -> None:
        if before:
            await asyncio.wait(before)
        previous = self._body.previous_response_id
        history = History() if previous is None else await self._history(previous)
        self._response = await begin(self._state, self._connection, self._body, history)
        ignored = self._connection.scope["state"].get("ignored", ())
        self._events = ResponseEvents(self._response, self.stream_id, ignored)
        self._due = self._events.start()
        self._on_news(self)
        await self._response.generation.complete(lambda _: self._on_news(self))
        self._end(self._events.finish())

    def _end(self, last: list[Event]) -> None:
        """End it in order: others may go on from here."""
        assert self._response is not None
        self._due += last
        self._conversations.keep(self._response.id, self._response.history())
        status = self._response.final_status
        if self._body.is_stored and self._response.choice.finish_reason is not None:
            stored = self._response.stored(self._response.snapshot(status))
            self._state.responses.keep(self._connection.state.tenant, self._response.id, stored)

    async def _history(self, previous: str) -> History:
        """Return what this socket remembers, or else what was stored. Raises ApiError 400."""
        if previous in self._conversations:
            return self._conversations.find(previous)
        return await self._state.responses.history(self._connection.state.tenant, previous)

    def _fail(self, error: ApiError) -> None:
        if self._response is None or self._events is None:
            self._due.append(error_event(error, stream_id=self.stream_id))
        else:
            self._due += self._events.failed(error)
            name, generation = self._response.id, self._response.generation
            log_failure(self._connection, name, {"response_id": name}, generation, error)

    def take(self) -> list[bytes]:
        due, self._due = self._due, []
        if self._response is not None and self._events is not None:
            self._response.generation.backlog = 0
            due += self._events.update()
        return [event.data for event in due]
