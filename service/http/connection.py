"""The far end of one HTTP exchange: it may leave, stop reading, or have to be told that we end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from starlette.types import Message, Scope, Send

from quire.service.config import ServiceConfig
from quire.service.errors import ApiError
from quire.service.http.cancellation import Interruptible
from quire.service.http.codec import error_response
from quire.service.http.dialects import dialect_of

STREAM_HEADERS = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
_TICK = 1.0


class ClientGone(Exception):
    """The client left, or was cut because it stopped reading. There is no one to answer."""


class Connection(Interruptible):
    """One exchange. Use with `async with`, in the task that answers.

    When the client leaves, or `interrupt` is called, the block is left by cancellation, which this turns into
    ClientGone or the given error. An own response instead of sse-starlette's: that one runs a generator and
    four tasks for each stream; here a chunk is one call of `send`, one timer a second does the keep-alive
    comments, and that the client has left is told by the server's protocol (quire.service.http.protocol),
    which also cuts one that stopped reading: no task waits for ASGI's word of it.
    """

    def __init__(self, scope: Scope, send: Send, config: ServiceConfig) -> None:
        super().__init__()
        self._abort: Callable[[], None] = scope["state"]["abort"]
        self._gone: asyncio.Future[None] = scope["state"]["gone"]
        self._scope = scope
        self._send = send
        self._config = config
        self._dialect = dialect_of(scope["path"])
        self._tick_seconds = min(_TICK, config.keep_alive / 2)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None
        self._sending = False
        self._last_write = self._loop.time()
        self.started = False  # the headers are out
        self._finished = False  # and all of the body

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._gone.add_done_callback(self._leave)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = self._end_work(error)
        self._gone.remove_done_callback(self._leave)
        if self._timer is not None:
            self._timer.cancel()
        if isinstance(reason or error, ClientGone):
            await self._abort_transport()
        if self._comment is not None:
            self._comment.cancel()
        if reason is not None:
            raise reason from None

    async def _abort_transport(self) -> None:
        """Abort it: a plain close would wait for ever for the client to read what is buffered."""
        self._abort()
        await asyncio.wait([self._gone], timeout=1)  # until the server, too, knows that it is gone

    def _leave(self, _: asyncio.Future[None]) -> None:
        self.interrupt(ClientGone("the client closed the connection"))

    def interrupt(self, reason: Exception) -> None:
        """End the exchange, unless its body is out: then the task is about to end in order."""
        if not self._finished:
            super().interrupt(reason)

    def keep_alive(self) -> None:
        """Make this a stream: from now on comments go out when it is idle, if there are any."""
        if self._dialect.keep_alive:
            self._timer = self._loop.call_later(self._tick_seconds, self._tick)

    def _tick(self) -> None:
        if not self._sending and self._loop.time() - self._last_write >= self._config.keep_alive:
            self._comment = self._loop.create_task(self._write_comment())
        self._timer = self._loop.call_later(self._tick_seconds, self._tick)

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Write a piece of the event stream, or the last one; the headers go first."""
        if self._comment is not None:
            await self._comment
            self._comment = None
        self._sending, self._last_write = True, self._loop.time()
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self._sending = False
        self._finished = last

    async def _start(self) -> None:
        headers = [(b"content-type", self._dialect.content_type), *STREAM_HEADERS]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self.started = True

    async def _write_comment(self) -> None:
        self._sending, self._last_write = True, self._loop.time()
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": self._dialect.keep_alive, "more_body": True})
        self._sending = False

    async def fail(self, error: ApiError, last: bytes) -> None:
        """Tell the client of `error`, outside the block: by the piece `last` if the stream has begun.

        The client has little time for that piece.
        """
        if not self.started:
            await error_response(error, self._scope["path"])(self._scope, _no_body, self._send)
            return
        try:
            async with asyncio.timeout(self._config.terminal_timeout):
                await self._send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:
            await self._abort_transport()


async def _no_body() -> Message:
    raise AssertionError("an error's answer asks for no body")
