"""Passes a WebSocket on to a replica, message by message, for as long as both sides stay."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import aiohttp
from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send

from quire.service.api.responses.heads import head_of
from quire.service.errors import ENGINE_DEAD, ApiError, not_ready
from quire.service.http.cancellation import Interruptible
from quire.service.http.connection import ClientGone
from quire.service.router.endings import tells_of_death
from quire.service.router.handshake import MAX_MESSAGE_BYTES, Handshake
from quire.service.router.line import Line
from quire.service.router.refusals import ReplicaLost, replica_lost
from quire.service.router.running import RunningResponses
from quire.service.router.running_answers import RunningAnswers
from quire.service.router.state import RouterState

log = logging.getLogger("quire.router")

_ANSWERING = frozenset({"/v1/completions", "/v1/chat/completions"})
GOING_AWAY, NO_STATUS, ABNORMAL, MESSAGE_TOO_BIG, INTERNAL_ERROR = 1001, 1005, 1006, 1009, 1011


@dataclass(frozen=True)
class Close:
    """How a WebSocket ends. A reason that came in a frame has room in another: 123 bytes."""

    code: int
    reason: str = ""
    error: ApiError | None = None  # why the router ends it, if it does

    @property
    def sent_code(self) -> int:
        """Return the code in a frame, which may have neither of the two that say that none came."""
        return {NO_STATUS: 1000, ABNORMAL: INTERNAL_ERROR}.get(self.code, self.code)


LOST = Close(ABNORMAL)


class Tunnel:
    """An ASGI app for WebSocket paths."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError unless a replica took the WebSocket."""
        self._state.check_open()
        await receive()  # websocket.connect
        said: list[Message] = []  # by the client meanwhile
        opening = Interruptible()  # by the router's end, and the client's

        async def listen() -> None:
            said.append(await receive())
            if said[0]["type"] == "websocket.disconnect":
                opening.interrupt(ClientGone("the client left during the handshake"))

        handshake = Handshake(self._state, HTTPConnection(scope))
        listening = asyncio.create_task(listen())
        self._state.streams.add(opening)
        try:
            async with opening:
                link = await handshake.connect()
        except ClientGone as gone:
            log.info("WebSocket ended: %s", gone)
            return
        finally:
            self._state.streams.discard(opening)
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

        async def receive_rest() -> Message:
            return said.pop() if said else await receive()

        line = Line(handshake, link)
        passage = Passage(self._state, scope, receive_rest, send, line)
        async with line.held(give_up=passage.lose):
            await send(
                {
                    "type": "websocket.accept",
                    "subprotocol": link.socket.protocol,
                    "headers": [(b"x-quire-route", link.placement.header(link.attempt))],
                }
            )
            await passage.run()


class Passage(Interruptible):
    """Both directions of one open WebSocket."""

    def __init__(
        self,
        state: RouterState,
        scope: Scope,
        receive: Receive,
        send: Send,
        line: Line,
    ) -> None:
        super().__init__()
        self._state = state
        self._scope = scope
        self._receive = receive
        self._send = send
        self._line = line
        answering = scope["path"] in _ANSWERING
        self._running: RunningAnswers | RunningResponses = (
            RunningAnswers() if answering else RunningResponses(self._note_stored)
        )
        self._is_placed = answering  # whether no message has the line lead elsewhere any more
        self._leaving = False

    async def run(self) -> None:
        """Pass messages on until either side closes, and tell the other one."""
        self._state.streams.add(self)
        close, ends = Close(GOING_AWAY), []
        try:
            async with self:
                close = await self._pass()
        except ReplicaLost:
            close = LOST
        except ApiError as reason:
            ends = self._running.fail(reason)
        except (OSError, TimeoutError):  # the client left, or reads no more
            self._scope["state"]["abort"]()
            return
        finally:
            self._state.streams.discard(self)
            self._state.generations.discard(self)
        error = close.error
        if error is None and (close.code == ABNORMAL or self._running):
            error = replica_lost(" in the middle of the WebSocket")
            if close.code != MESSAGE_TOO_BIG:  # which is about what the client said
                self._line.lost(
                    f"a WebSocket ended with {close.code} and {len(self._running)} unfinished answers"
                )
        if error is not None:
            self._state.metrics.failures["during"] += 1
            ends = self._running.lose(error)
        try:
            async with asyncio.timeout(self._state.config.terminal_timeout):
                for end in ends:
                    await self._say(end)
                await self._send({"type": "websocket.close", "code": close.sent_code, "reason": close.reason})
        except (OSError, TimeoutError):
            self._scope["state"]["abort"]()

    def interrupt(self, reason: Exception) -> None:
        """Let answers that run end first, as at the router's end; a drain interrupts again when they must."""
        if self._running and not self._leaving:
            self._leaving = True
        else:
            super().interrupt(reason)

    def lose(self) -> None:
        """Note that the replica is lost, although its connection is not."""
        super().interrupt(ReplicaLost("it does not answer any more", begun=True))

    async def _pass(self) -> Close:
        """Return how to close: as the replica does; LOST if it does not say.

        A replica that takes no more may have said things before: they are the client's.
        """
        up = asyncio.create_task(self._pass_up())
        down = asyncio.create_task(self._pass_down())
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            if up.done():
                up.result()  # raises if the client left
                await asyncio.wait((down,), timeout=self._state.config.terminal_timeout)
            return down.result() if down.done() else LOST
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _pass_up(self) -> None:
        """Pass the client's messages on until the replica takes no more.

        Raises ConnectionResetError once the client has left.
        """
        while (message := await self._receive())["type"] == "websocket.receive":
            text = message.get("text")
            if self._leaving and self._running.asks(text):
                await self._say(self._running.refusal(text, not_ready("the router is shutting down", 5)))
                continue
            self._running.ask(text)
            self._count()
            previous = None if self._is_placed else head_of(text).previous_id
            if previous is not None:
                try:
                    await self._line.go_on_from(previous)
                except ApiError as error:
                    await self._refuse(text, error)
                    continue
            self._is_placed = True
            try:
                await self._line.send(message["bytes"] if text is None else text)
            except (aiohttp.ClientError, OSError):
                return
        raise ConnectionResetError("the client closed the WebSocket")

    async def _refuse(self, text: str | None, error: ApiError) -> None:
        """Refuse a message. Raises `error` if the router's end waited for nothing else on this socket."""
        refusal = self._running.refusal(text, error)
        await self._say(refusal)
        self._running.note(refusal)
        self._count()
        if self._leaving and not self._running:
            raise error

    async def _pass_down(self) -> Close:
        while True:
            message = await self._line.receive()
            if message.type is aiohttp.WSMsgType.TEXT:
                if ENGINE_DEAD in message.data and tells_of_death(message.data.encode()):
                    return LOST
                await self._say(message.data)
                outcome = self._running.note(message.data)
                if outcome is not None:
                    self._line.fared(outcome)
                self._count()
                if self._leaving and not self._running:
                    return Close(GOING_AWAY)
            elif message.type is aiohttp.WSMsgType.BINARY:
                await self._say(message.data)
            elif message.type is aiohttp.WSMsgType.CLOSE:
                return Close(message.data or NO_STATUS, message.extra or "")
            elif isinstance(message.data, aiohttp.WebSocketError) and message.data.code == MESSAGE_TOO_BIG:
                text = f"a message of the replica has more than the {MAX_MESSAGE_BYTES} bytes that pass on"
                return Close(INTERNAL_ERROR, text, ApiError(502, text, code="message_too_large"))
            else:
                return LOST

    def _note_stored(self, response_id: str) -> None:
        """Have later requests about it go where it is."""
        key = self._scope["state"]["tenant"], response_id
        self._state.response_affinity.settle(key, self._line.replica)

    def _count(self) -> None:
        """Count what runs, which a drain waits for."""
        if self._running:
            self._state.generations.add(self)
        else:
            self._state.generations.discard(self)

    async def _say(self, message: str | bytes) -> None:
        kind = "text" if isinstance(message, str) else "bytes"
        async with asyncio.timeout(self._state.config.send_timeout):
            await self._send({"type": "websocket.send", kind: message})
