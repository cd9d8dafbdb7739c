"""One `response.create` of a WebSocket, from the request to its last event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from starlette.requests import HTTPConnection

from quire.service.answer.conversations import Conversations
from quire.service.api.responses.events import ResponseEvents, error_event
from quire.service.api.responses.protocol import ResponseCreate
from quire.service.api.responses.response import ModelResponse, begin
from quire.service.api.responses.writer import Event
from quire.service.errors import ApiError
from quire.service.http.cancellation import Interruptible
from quire.service.state import ServerState

log = logging.getLogger("quire.service")


class Cancelled(Exception):
    """The client wants no more of a response."""


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
        """None before the engine has it."""
        return None if self._response is None else self._response.id

    @property
    def stream_id(self) -> str | None:
        return self._body.stream_id

    @property
    def backlog(self) -> int:
        """Bytes, about, that have come and were not taken."""
        return 0 if self._response is None else self._response.generation.backlog

    async def run(self, before: Sequence[asyncio.Task[None]]) -> None:
        """Waits for `before`. Interrupt it with Cancelled or an ApiError."""
        self._state.generations.add(self)
        try:
            with self.working():
                if before:
                    await asyncio.wait(before)
                await self._generate()
            self._end(lambda events: events.finish())
        except Cancelled:
            self._end(lambda events: events.cancelled())
        except ApiError as error:
            self._fail(error)
        except Exception:
            log.exception("a response failed")
            self._fail(ApiError(500, "internal error", code="internal_error"))
        finally:
            if self._response is not None:
                self._response.generation.close()
        self._on_news(self)

    async def _generate(self) -> None:
        previous = self._body.previous_response_id
        history = [] if previous is None else self._conversations.find(previous)
        self._response = await begin(self._state, self._connection, self._body, history)
        self._events = ResponseEvents(self._response, self.stream_id)
        self._due = self._events.start()
        self._on_news(self)
        generation = self._response.generation
        while not generation.finished:
            await generation.advance()
            self._on_news(self)

    def _end(self, last: Callable[[ResponseEvents], list[Event]]) -> None:
        """In order: others may go on from here."""
        assert self._response is not None and self._events is not None
        self._due += last(self._events)
        self._conversations.keep(self._response.id, self._response.conversation())
        self.ended = True

    def _fail(self, error: ApiError) -> None:
        failed = (
            self._events.failed(error) if self._events else [error_event(error, stream_id=self.stream_id)]
        )
        self._due += failed
        self.ended = True
        if self._response is not None:
            self._log_failure(self._response, error)

    def _log_failure(self, response: ModelResponse, error: ApiError) -> None:
        """As the line of an HTTP request says it; a socket's own has room for one failure only."""
        log.info(
            "%s of a WebSocket failed",
            response.id,
            extra={
                "request_id": self._connection.state.request_id.decode(),
                "response_id": response.id,
                "error": error.code,
                "engine_requests": response.generation.engine_requests,
            },
        )

    def take(self) -> list[Event]:
        due, self._due = self._due, []
        if self._response is not None and self._events is not None:
            self._response.generation.backlog = 0
            due += self._events.update()
        return due
