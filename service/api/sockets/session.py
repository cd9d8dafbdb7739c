"""An open WebSocket on which several answers are made at once, whatever the form of its messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send

from quire.service.answer.outbox import Outbox, Source
from quire.service.errors import ApiError, bad_value
from quire.service.http.cancellation import Interruptible
from quire.service.http.connection import ClientGone
from quire.service.http.eager import start_eagerly
from quire.service.http.subprotocols import selected
from quire.service.state import ServerState

log = logging.getLogger("quire.service")

MAX_ANSWERS = 16  # at once, those included whose last message the client has not been sent
GOING_AWAY = 1001
_BYTES_PER_TIMEOUT = 1 << 20  # a client has `send_timeout` for each so much of a message


async def accept(state: ServerState, scope: Scope, receive: Receive, send: Send) -> None:
    """Take the WebSocket. Raises ApiError instead, for the handshake's answer, unless requests are served."""
    state.generating()
    await receive()  # websocket.connect
    await send({"type": "websocket.accept", "subprotocol": selected(scope)})


def own_connection(scope: Scope) -> HTTPConnection:
    """Return the connection as one answer sees it: what is noted there is none of the others' business."""
    return HTTPConnection({**scope, "state": {**scope["state"]}})


class SocketAnswer(Source, Protocol):
    """An answer while it is made, which has the messages that are due."""

    def interrupt(self, reason: Exception) -> None: ...


class _Said:
    """A message goes out as those of an answer do."""

    ended = True

    def __init__(self, message: bytes) -> None:
        self._message = message

    @property
    def backlog(self) -> int:
        return len(self._message)

    def take(self) -> list[bytes]:
        return [self._message]


A = TypeVar("A", bound=SocketAnswer)


class SocketSession(Interruptible, Generic[A]):
    """One task reads, and each answer has one of its own. Their messages leave by one outbox."""

    def __init__(
        self,
        state: ServerState,
        scope: Scope,
        receive: Receive,
        send: Send,
        obey: Callable[[str], None],
        refuse: Callable[[ApiError], None],
    ) -> None:
        """`obey` is told each text that comes; `refuse`, of the ApiErrors it raises and of other frames."""
        super().__init__()
        self._state = state
        self._scope = scope
        self._receive = receive
        self._send = send
        self._obey = obey
        self._refuse = refuse
        self.answers: dict[A, asyncio.Task[None]] = {}  # the oldest first
        self._outbox: Outbox[A | _Said] = Outbox(
            self._write, super().interrupt, state.config.max_backlog_bytes
        )
        self._sent_bytes = 0  # of the latest message
        self._leaving = False
        self._left = asyncio.Event()  # there is nothing more to wait for

    async def run(self) -> None:
        """Serve it until either side closes. Then nothing of it runs any more."""
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
            tasks += self.answers.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._state.generations.difference_update(self.answers)

    @property
    def full(self) -> bool:
        return len(self.answers) >= MAX_ANSWERS

    def start(self, answer: A, steps: Coroutine[Any, Any, None]) -> None:
        """Have an answer made by these steps; it is there until its last message is out."""
        self.answers[answer] = asyncio.get_running_loop().create_task(steps)

    def put(self, answer: A) -> None:
        """Note that the answer has messages."""
        self._put(answer)

    def say(self, message: bytes) -> None:
        self._put(_Said(message))

    def interrupt(self, reason: Exception) -> None:
        """At the server's end, those that run may end first (a drain interrupts them when they must)."""
        if isinstance(reason, ClientGone):
            super().interrupt(reason)
        else:
            self._leaving = True
            self._look_round()

    def _look_round(self) -> None:
        if self._leaving and not self.answers:
            self._left.set()

    async def _leave(self) -> None:
        await self._left.wait()
        await self._outbox.flush()
        await self._pass({"type": "websocket.close", "code": GOING_AWAY})

    async def _read(self) -> None:
        while (message := await self._receive())["type"] == "websocket.receive":
            try:
                text = message.get("text")
                if text is None:
                    raise bad_value(
                        None,
                        "a message must be a text frame with JSON, got a binary one",
                        "binary_message",
                    )
                self._obey(text)
            except ApiError as error:
                self._refuse(error)

    def _put(self, item: A | _Said) -> None:
        try:
            self._outbox.put(item)
        except Exception as error:
            super().interrupt(error)

    async def _write(self, item: A | _Said) -> None:
        ended = item.ended  # now: later there may be more messages
        for data in item.take():
            await self._pass({"type": "websocket.send", "text": data.decode()})
            self._sent_bytes = len(data)
        if ended and not isinstance(item, _Said):
            del self.answers[item]
            self._state.generations.difference_update((item,))
            self._look_round()

    async def _pass(self, message: Message) -> None:
        """Send, without waiting if the client reads; one that stopped reading is cut."""
        try:
            rest = start_eagerly(_sent(self._send, message))
            if rest is not None:
                timer = asyncio.get_running_loop().call_later(
                    self._state.config.send_timeout * max(1.0, self._sent_bytes / _BYTES_PER_TIMEOUT),
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
