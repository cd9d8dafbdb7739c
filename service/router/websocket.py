"""Passes a WebSocket on to a replica, message by message, for as long as both sides stay."""

from __future__ import annotations

import asyncio
import logging

import aiohttp
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from quire.service.errors import ENGINE_DEAD, ApiError, not_ready
from quire.service.http.cancellation import Interruptible
from quire.service.router.endings import tells_of_death
from quire.service.router.headers import as_text, passed_on
from quire.service.router.placement import NOWHERE, Placement
from quire.service.router.refusals import ReplicaLost, replica_lost
from quire.service.router.replica import Replica
from quire.service.router.running import RunningResponses
from quire.service.router.running_answers import RunningAnswers
from quire.service.router.state import RouterState

log = logging.getLogger("quire.router")

MAX_ATTEMPTS = 3
HANDSHAKE_SECONDS = 10.0  # a replica that can take a WebSocket does so at once
_ANSWERING = frozenset({"/v1/completions", "/v1/chat/completions"})
GOING_AWAY, NO_STATUS, ABNORMAL, INTERNAL_ERROR = 1001, 1005, 1006, 1011


class Tunnel:
    """An ASGI app for WebSocket paths. Nothing is known of their prompts yet: they go by load."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError unless a replica took the WebSocket."""
        self._state.check_open()
        await receive()  # websocket.connect
        opening = Interruptible()  # by the router's end
        self._state.streams.add(opening)
        try:
            async with opening:
                placement, attempt, replica = await self._connect(HTTPConnection(scope))
        finally:
            self._state.streams.discard(opening)
        passage = Passage(self._state, scope, receive, send, replica)
        try:
            with placement.replica.request(give_up=passage.lose):
                await send(
                    {
                        "type": "websocket.accept",
                        "subprotocol": replica.protocol,
                        "headers": [(b"x-quire-route", placement.header(attempt))],
                    }
                )
                await passage.run()
        finally:
            await replica.close()

    async def _connect(
        self, client: HTTPConnection
    ) -> tuple[Placement, int, aiohttp.ClientWebSocketResponse]:
        tried: set[Replica] = set()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            placement = await self._state.place(NOWHERE, tried)
            tried.add(placement.replica)
            self._state.metrics.placed(placement, attempt)
            try:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    opened = await self._open(client, placement)
                asked = client.state.tenant, client.state.request_id.decode()
                self._state.request_affinity.settle(asked, placement.replica)
                return placement, attempt, opened
            except aiohttp.WSServerHandshakeError as refusal:
                if refusal.status not in (429, 502, 503) or attempt == MAX_ATTEMPTS:
                    message = f"the replica refused the WebSocket: {refusal.status}"
                    raise ApiError(refusal.status, message, code="websocket_refused") from None
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                placement.replica.lost(error)
        raise ApiError(503, "no replica could answer", code="not_ready", retry_after=2)

    async def _open(self, client: HTTPConnection, placement: Placement) -> aiohttp.ClientWebSocketResponse:
        session = self._state.session
        assert session is not None
        headers = [*passed_on(client.headers.raw), (b"x-request-id", client.state.request_id)]
        headers = [header for header in headers if header[0] != b"origin"]  # it is ours, and was checked
        return await session.ws_connect(
            placement.replica.address(client.scope),
            headers=dict(as_text([*headers, *placement.headers])),
            protocols=client.scope["subprotocols"],
            max_msg_size=0,  # the replica's limits count
        )


class Passage(Interruptible):
    """Both directions of one open WebSocket."""

    def __init__(
        self,
        state: RouterState,
        scope: Scope,
        receive: Receive,
        send: Send,
        replica: aiohttp.ClientWebSocketResponse,
    ) -> None:
        super().__init__()
        self._state = state
        self._scope = scope
        self._receive = receive
        self._send = send
        self._replica = replica
        self._running: RunningAnswers | RunningResponses = (
            RunningAnswers() if scope["path"] in _ANSWERING else RunningResponses()
        )
        self._leaving = False

    async def run(self) -> None:
        """Until either side closes, and the other one has been told."""
        self._state.streams.add(self)
        code, ends = GOING_AWAY, []
        try:
            async with self:
                code = await self._pass()
        except ReplicaLost:
            code = ABNORMAL
        except ApiError as reason:
            ends = self._running.fail(reason)
        except (OSError, TimeoutError):  # the client left, or reads no more
            self._scope["state"]["abort"]()
            return
        finally:
            self._state.streams.discard(self)
            self._state.generations.discard(self)
        if code == ABNORMAL or self._running:
            self._state.metrics.failures["during"] += 1
            ends = self._running.lose(replica_lost(" in the middle of the WebSocket"))
            code = INTERNAL_ERROR if code == ABNORMAL else code
        try:
            async with asyncio.timeout(self._state.config.terminal_timeout):
                for end in ends:
                    await self._say(end)
                await self._send({"type": "websocket.close", "code": 1000 if code == NO_STATUS else code})
        except (OSError, TimeoutError):
            self._scope["state"]["abort"]()

    def interrupt(self, reason: Exception) -> None:
        """At the router's end, answers that run may end first; a drain interrupts again when they must."""
        if self._running and not self._leaving:
            self._leaving = True
        else:
            super().interrupt(reason)

    def lose(self) -> None:
        """The replica is lost, although its connection is not."""
        super().interrupt(ReplicaLost("it does not answer any more", begun=True))

    async def _pass(self) -> int:
        """The code to close with: the replica's; ABNORMAL if it said none.

        A replica that takes no more may have said things before: they are the client's.
        """
        up = asyncio.create_task(self._pass_up())
        down = asyncio.create_task(self._pass_down())
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            if up.done():
                up.result()  # raises if the client left
                await asyncio.wait((down,), timeout=self._state.config.terminal_timeout)
            return down.result() if down.done() else ABNORMAL
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _pass_up(self) -> int:
        while (message := await self._receive())["type"] == "websocket.receive":
            text = message.get("text")
            if self._leaving and self._running.asks(text):
                await self._say(self._running.refusal(text, not_ready("the router is shutting down", 5)))
                continue
            self._running.ask(text)
            self._count()
            try:
                if text is not None:
                    await self._replica.send_str(text)
                else:
                    await self._replica.send_bytes(message["bytes"])
            except (aiohttp.ClientError, OSError):
                return ABNORMAL
        raise ConnectionResetError("the client closed the WebSocket")

    async def _pass_down(self) -> int:
        while True:
            message = await self._replica.receive()
            if message.type is aiohttp.WSMsgType.TEXT:
                if ENGINE_DEAD in message.data and tells_of_death(message.data.encode()):
                    return ABNORMAL
                await self._say(message.data)
                self._running.note(message.data)
                self._count()
                if self._leaving and not self._running:
                    return GOING_AWAY
            elif message.type is aiohttp.WSMsgType.BINARY:
                await self._say(message.data)
            elif message.type is aiohttp.WSMsgType.CLOSE:
                return self._replica.close_code or NO_STATUS
            else:
                return ABNORMAL

    def _count(self) -> None:
        """A drain waits for what runs."""
        if self._running:
            self._state.generations.add(self)
        else:
            self._state.generations.discard(self)

    async def _say(self, message: str | bytes) -> None:
        kind = "text" if isinstance(message, str) else "bytes"
        async with asyncio.timeout(self._state.config.send_timeout):
            await self._send({"type": "websocket.send", kind: message})
