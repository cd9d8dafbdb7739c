"""The ways by which an answer comes: as an event stream over HTTP, or as frames of a WebSocket."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import aiohttp

from quire.loadtest.client.answer import Answer
from quire.loadtest.client.http_client import Disconnected, HttpClient

CLOSE_SECONDS = 1.0  # for the other side's word on the end of a socket


class Transport(Protocol):
    async def ask(self, path: str, body: bytes, answer: Answer) -> tuple[int, bytes]:
        """Feed the answer; return the status, and what a server says that answers other than with 200.

        Raise OSError (Disconnected, too), TimeoutError, HttpParserError, or what `answer` raises.
        """
        ...

    async def close(self) -> None: ...


class EventStreams:
    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def ask(self, path: str, body: bytes, answer: Answer) -> tuple[int, bytes]:
        return await self._client.post(path, body, answer.feed)

    async def close(self) -> None:
        self._client.close()


class Sockets:
    """A socket for each request that is under way; those that are idle are used again."""

    def __init__(self, base_url: str, headers: dict[str, str], timeout: float) -> None:
        self._base_url = base_url.replace("http", "ws", 1)
        self._headers = headers
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None  # from the first request on: it needs a loop
        self._idle: dict[str, list[aiohttp.ClientWebSocketResponse]] = {}  # by path

    async def ask(self, path: str, body: bytes, answer: Answer) -> tuple[int, bytes]:
        idle = self._idle.setdefault(path, [])
        async with asyncio.timeout(self._timeout):
            while idle:
                kept = idle.pop()
                if await self._exchange(kept, body, answer):
                    idle.append(kept)
                    return 200, b""
                # The server closed it while it was idle, and has not seen this request.
            try:
                socket = await self._open(path)
            except aiohttp.WSServerHandshakeError as refusal:
                return refusal.status, refusal.message.encode()
            if not await self._exchange(socket, body, answer):
                raise Disconnected(f"the server closed the WebSocket with {socket.close_code}")
            idle.append(socket)
        return 200, b""

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _open(self, path: str) -> aiohttp.ClientWebSocketResponse:
        """Raise WSServerHandshakeError for a refusal, and OSError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        try:
            return await self._session.ws_connect(
                self._base_url + path,
                headers=self._headers,
                max_msg_size=0,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS),
            )
        except aiohttp.WSServerHandshakeError:
            raise
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error)) from error

    @staticmethod
    async def _exchange(socket: aiohttp.ClientWebSocketResponse, body: bytes, answer: Answer) -> bool:
        """Return False if the socket was closed before the first frame. Raise Disconnected if it is later."""
        begun = False
        try:
            await socket.send_str(body.decode())
            while not answer.ended:
                message = await socket.receive()
                if message.type is not aiohttp.WSMsgType.TEXT:
                    if begun:
                        raise Disconnected(f"the server closed the WebSocket with {socket.close_code}")
                    return False
                begun = True
                answer.feed_frame(message.data, time.monotonic())
        except aiohttp.ClientError as error:
            if begun:
                raise Disconnected(str(error)) from error
            return False
        except BaseException:  # the answer is wanted no more
            await socket.close()
            raise
        return True
