"""WS /v1/responses: several responses at once on one socket, told apart by their id."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send

from quire.service.answer.conversations import Conversations
from quire.service.answer.outbox import Outbox
from quire.service.api.responses.events import error_event
from quire.service.api.responses.protocol import ClientEvent, ResponseCancel, ResponseCreate
from quire.service.api.responses.socket_response import Cancelled, SocketResponse
from quire.service.api.responses.writer import Event
from quire.service.errors import ApiError, bad_value
from quire.service.http.cancellation import Interruptible
from quire.service.http.codec import parse
from quire.service.http.connection import ClientGone
from quire.service.http.eager import start_eagerly
from quire.service.state import ServerState

log = logging.getLogger("quire.service")

MAX_RESPONSES = 16  # at once, those included whose last event the client has not been sent
GOING_AWAY = 1001

_decoder = msgspec.json.Decoder(ClientEvent)


class _Refusal:
    """Goes out as the events of a response do."""

    ended = True

    def __init__(self, event: Event) -> None:
        self._data = event.data

    @property
    def backlog(self) -> int:
        return len(self._data)

    def take(self) -> list[bytes]:
        return [self._data]


class ResponsesSocket:
    """An ASGI app. Raises ApiError before the handshake's end; later, errors are events."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._state.serving()
        await receive()  # websocket.connect
        await send({"type": "websocket.accept"})
        await _Session(self._state, scope, receive, send).run()


class _Session(Interruptible):
    """One task reads, and each response has one of its own. Their events leave by one outbox."""

    def __init__(self, state: ServerState, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__()
        self._state = state
        self._scope = scope
        self._receive = receive
        self._send = send
        self._conversations = Conversations(
            state.config.max_conversation_bytes, state.conversations, scope["state"]["tenant"]
        )
        self._responses: dict[SocketResponse, asyncio.Task[None]] = {}  # the oldest first
        self._outbox: Outbox[SocketResponse | _Refusal] = Outbox(
            self._write, super().interrupt, state.config.max_backlog_bytes
        )
        self._leaving = False
        self._left = asyncio.Event()  # there is nothing more to wait for

    async def run(self) -> None:
        """Until either side closes. Then nothing of it runs any more."""
        self._state.streams.add(self)
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._read()), loop.create_task(self._leave())]
        try:
            async with self:
                ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
        except ClientGone as gone:
            log.info("WebSocket ended: %s", gone)
            self._scope["state"]["abort"]()
        finally:
            self._state.streams.discard(self)
            self._outbox.close()
            tasks += self._responses.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._state.generations.difference_update(self._responses)
            self._conversations.close()

    def interrupt(self, reason: Exception) -> None:
        """At the server's end, those that run may end first (a drain interrupts them when they must)."""
        if isinstance(reason, ClientGone):
            super().interrupt(reason)
        else:
            self._leaving = True
            self._look_round()

    def _look_round(self) -> None:
        if self._leaving and not self._responses:
            self._left.set()

    async def _leave(self) -> None:
        await self._left.wait()
        await self._outbox.flush()
        await self._say({"type": "websocket.close", "code": GOING_AWAY})

    async def _read(self) -> None:
        while (message := await self._receive())["type"] == "websocket.receive":
            try:
                self._obey(message)
            except ApiError as error:
                self._refuse(error)

    def _obey(self, message: Message) -> None:
        text = message.get("text")
        if text is None:
            raise bad_value(
                None, "a message must be a text frame with JSON, got a binary one", "binary_message"
            )
        event = parse(text, _decoder)
        if isinstance(event, ResponseCreate):
            self._create(event)
        else:
            self._cancel(event)

    def _create(self, body: ResponseCreate) -> None:
        if len(self._responses) >= MAX_RESPONSES:
            message = f"{MAX_RESPONSES} responses run on this WebSocket already: wait until one has ended"
            refusal = ApiError(429, message, code="too_many_responses")
            self._refuse(refusal, stream_id=body.stream_id)
            return
        response = SocketResponse(
            self._state, HTTPConnection(self._scope), body, self._conversations, self._queue
        )
        before = [
            task
            for other, task in self._responses.items()
            if (body.stream_id is not None and other.stream_id == body.stream_id)
            or (other.id is not None and other.id == body.previous_response_id)
        ]
        self._responses[response] = asyncio.get_running_loop().create_task(response.run(before))

    def _cancel(self, event: ResponseCancel) -> None:
        for response in self._responses:
            if response.id == event.response_id and not response.ended:
                response.interrupt(Cancelled())
                return
        message = f"no response {event.response_id!r} runs on this WebSocket"
        refusal = ApiError(404, message, param="response_id", code="response_not_found")
        self._refuse(refusal, response_id=event.response_id)

    def _refuse(self, error: ApiError, **names: str | None) -> None:
        self._queue(_Refusal(error_event(error, **names)))

    def _queue(self, item: SocketResponse | _Refusal) -> None:
        try:
            self._outbox.put(item)
        except Exception as error:
            super().interrupt(error)

    async def _write(self, item: SocketResponse | _Refusal) -> None:
        ended = item.ended  # now: later there may be more events
        for data in item.take():
            await self._say({"type": "websocket.send", "text": data.decode()})
        if ended and isinstance(item, SocketResponse):
            del self._responses[item]
            self._state.generations.discard(item)
            self._look_round()

    async def _say(self, message: Message) -> None:
        """Send, without waiting if the client reads; one that stopped reading is cut."""
        try:
            rest = start_eagerly(_sent(self._send, message))
            if rest is not None:
                timer = asyncio.get_running_loop().call_later(
                    self._state.config.send_timeout,
                    super().interrupt,
                    ClientGone("the client stopped reading"),
                )
                try:
                    await rest
                finally:
                    timer.cancel()
        except OSError:
            raise ClientGone("the client closed it") from None


async def _sent(send: Send, message: Message) -> None:
    await send(message)
