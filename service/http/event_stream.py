"""A stream of events that are not tokens, answered by sse-starlette."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import AsyncGeneratorType

import anyio
import msgspec
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.types import Message, Receive, Scope, Send

from quire.service.config import ServiceConfig
from quire.service.errors import ApiError, not_ready
from quire.service.http.cancellation import Stoppable
from quire.service.http.framing import SSE


class EventStream(EventSourceResponse):
    """Send each of `events` as JSON, until they end, the client leaves, or `interrupt` is called.

    The headers go out with the first event or comment: an ApiError that `events` raise before is an HTTP
    status, and one that they raise later is the last event. The stream is in `streams` while it runs.
    """

    def __init__(
        self,
        events: AsyncIterator[msgspec.Struct | msgspec.Raw],
        config: ServiceConfig,
        streams: set[Stoppable],
    ) -> None:
        self._streams = streams
        self._events = events
        self._reason: Exception = not_ready("the server is shutting down")
        self._shutdown = anyio.Event()
        self._order = asyncio.Lock()  # between the stream and its comments
        self._head: Message | None = None  # until it is sent
        self._started = False
        super().__init__(
            self._frames(events),
            sep="\n",
            ping=config.keep_alive,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
            send_timeout=config.send_timeout,
            shutdown_event=self._shutdown,
            shutdown_grace_period=config.terminal_timeout,
        )
        del self.headers["connection"]  # the HTTP server's to say

    def interrupt(self, reason: Exception) -> None:
        """End the stream with `reason` as its last event."""
        self._reason = reason
        self._shutdown.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_order(message: Message) -> None:
            async with self._order:
                if message["type"] == "http.response.start":
                    self._head = message
                    return
                head, self._head = self._head, None
                if head is not None:
                    self._started = True
                    await send(head)
                await send(message)

        self._streams.add(self)
        try:
            await super().__call__(scope, receive, send_in_order)
        except SendTimeoutError:
            scope["state"]["abort"]()  # a plain close would wait for what is buffered to be read
            await asyncio.wait([scope["state"]["gone"]], timeout=1)
        finally:
            self._streams.discard(self)
            if isinstance(self._events, AsyncGeneratorType) and not self._events.ag_running:
                await self._events.aclose()  # now, and not when a collector finds it

    async def _frames(self, events: AsyncIterator[msgspec.Struct | msgspec.Raw]) -> AsyncIterator[bytes]:
        stopped = asyncio.ensure_future(self._shutdown.wait())
        try:
            while True:
                event = asyncio.ensure_future(anext(events, None))
                try:
                    await asyncio.wait([event, stopped], return_when=asyncio.FIRST_COMPLETED)
                    if not event.done():
                        raise self._reason
                finally:
                    event.cancel()
                if event.result() is None:
                    return
                yield SSE.message(msgspec.json.encode(event.result()))
        except ApiError as error:
            if not self._started:
                raise
            yield SSE.message(error.body())
        finally:
            stopped.cancel()
