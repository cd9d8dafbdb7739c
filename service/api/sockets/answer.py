"""The answer to one frame of a WebSocket, from the request to its last frame."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import HTTPConnection

from quire.service.answer.stream import AnswerEvents, failure_of, stream, whole
from quire.service.api.answers import Answer
from quire.service.api.sockets.failures import Cancelled, log_failure
from quire.service.api.sockets.frames import cancelled, done, failed, from_stream, tagged
from quire.service.errors import ApiError
from quire.service.http.cancellation import Interruptible
from quire.service.http.framing import TEXT
from quire.service.state import ServerState


class TaggedAnswer(Interruptible):
    """`run` generates; `take` gives the frames, of which the last comes once: text that waits is merged."""

    def __init__(
        self,
        state: ServerState,
        connection: HTTPConnection,
        tag: str | None,
        begin: Callable[[], Awaitable[Answer]],
        on_news: Callable[[TaggedAnswer], None],
        *,
        streamed: bool,
    ) -> None:
        """`begin` hands the request to the engine; `on_news` is called when there is something to take."""
        super().__init__()
        self._state = state
        self._connection = connection
        self.tag = tag
        self._begin = begin
        self._on_news = on_news
        self._streamed = streamed
        self._answer: Answer | None = None  # once the engine has it
        self._events: AnswerEvents | None = None
        self._last: list[bytes] | None = None  # of what does not end as a stream does

    @property
    def ended(self) -> bool:
        """Return whether its last frame is due, or was taken."""
        return self._last is not None or (self._events is not None and self._events.ended)

    @property
    def backlog(self) -> int:
        return 0 if self._events is None else self._events.backlog

    @property
    def _ignored(self) -> list[str]:
        """Return the fields of the request that have no effect, as noted of its connection."""
        noted: list[str] = self._connection.scope["state"].get("ignored", [])
        return noted

    async def run(self, before: Sequence[asyncio.Task[None]]) -> None:
        """Wait for `before`, then generate. Interrupt it with Cancelled or another ApiError."""
        self._state.generations.add(self)
        try:
            error = await failure_of(self, self._generate(before))
            if error is not None and not self.ended:
                self._fail(error)
        finally:
            if self._answer is not None:
                self._answer.generation.close()

    async def _generate(self, before: Sequence[asyncio.Task[None]]) -> None:
        if before:
            await asyncio.wait(before)
        self._answer = answer = await self._begin()
        if self._streamed:
            await stream(answer.generation, answer.encoder(TEXT), self._tell)
        else:
            reply = await whole(answer.generation, answer.reply, self._state.pool)
            self._end([tagged(reply, self.tag), done(self.tag, self._ignored)])

    def _tell(self, events: AnswerEvents) -> None:
        self._events = events
        self._on_news(self)

    def _fail(self, error: ApiError) -> None:
        if isinstance(error, Cancelled):
            self._end([cancelled(self.tag)])
            return
        if self._answer is not None:
            name = {} if self.tag is None else {"tag": self.tag}
            log_failure(self._connection, "an answer", name, self._answer.generation, error)
        self._end([failed(error, self.tag)])

    def _end(self, last: list[bytes]) -> None:
        self._last = last
        self._on_news(self)

    def take(self) -> list[bytes]:
        if self._last is not None:
            return self._last
        assert self._events is not None
        return [from_stream(message, self.tag, self._ignored) for message in self._events.take()]
