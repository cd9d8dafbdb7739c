"""A client's line to a replica, which may lead to another one before anything has been asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import aiohttp

from quire.service.router.failures import Outcome
from quire.service.router.handshake import Handshake, Link
from quire.service.router.replica import Replica


class Line:
    def __init__(self, handshake: Handshake, link: Link) -> None:
        self._handshake = handshake
        self._link = link
        self._sent_at = link.began  # when it was asked last
        self._requests = contextlib.ExitStack()
        self._give_up: Callable[[], None] = lambda: None
        self._closing: asyncio.Task[bool] | None = None  # of the WebSocket that was left

    @property
    def replica(self) -> Replica:
        return self._link.replica

    @contextlib.asynccontextmanager
    async def held(self, give_up: Callable[[], None]) -> AsyncIterator[None]:
        """Close it in the end. `give_up` is called once it is in vain to wait for the replica."""
        self._give_up = give_up
        try:
            with self._requests:
                self._count()
                yield
        finally:
            await self._link.socket.close()
            if self._closing is not None:
                await self._closing

    def lost(self, reason: str) -> None:
        """Note that the replica failed on it."""
        self.replica.failed(self._sent_at, reason)

    def fared(self, outcome: Outcome) -> None:
        """Note how what was asked on it fared."""
        self.replica.fared(outcome, self._sent_at)

    def _count(self) -> None:
        self._requests.close()
        self._requests.enter_context(self.replica.request(give_up=self._give_up))

    async def go_on_from(self, response_id: str) -> None:
        """Have it lead to who stored a response, if that is another replica; before anything was sent.

        Raises ApiError if that cannot be.
        """
        link = await self._handshake.go_on_from(response_id, self.replica)
        if link is None:
            return
        left, self._link = self._link, link
        self._count()
        self._closing = asyncio.create_task(left.socket.close())  # not to wait for its answer

    async def send(self, message: str | bytes) -> None:
        self._sent_at = time.monotonic()
        socket = self._link.socket
        await (socket.send_str(message) if isinstance(message, str) else socket.send_bytes(message))

    async def receive(self) -> aiohttp.WSMessage:
        """Return the next message of the replica; one that was left has nothing to say."""
        while True:
            socket = self._link.socket
            message = await socket.receive()
            if socket is self._link.socket:
                return message
