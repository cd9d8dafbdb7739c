"""A request's body while it comes: bounded in size and time, and all of them together in memory."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive

from quire.service.config import ServiceConfig
from quire.service.errors import ApiError


class Bodies:
    """The parts that have come of bodies that are not whole yet."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.size = 0  # bytes


class Body:
    """Counts and times a body while it comes. After its end the client may be silent for ever."""

    def __init__(self, receive: Receive, bodies: Bodies) -> None:
        self._receive = receive
        self._bodies = bodies
        self._config = bodies.config
        self._size = 0
        self._deadline: float | None = None
        self._complete = False

    async def receive(self) -> Message:
        """Raises ApiError 408, 413 or 429."""
        if self._complete:
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._config.receive_timeout
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            seconds = self._config.receive_timeout
            raise ApiError(
                408, f"the body did not come within {seconds:g} s", code="receive_timeout"
            ) from None
        if message["type"] == "http.request":
            self._take(len(message.get("body", b"")))
            if not message.get("more_body", False):
                self.close()
        return message

    def _take(self, size: int) -> None:
        self._size += size
        self._bodies.size += size
        if self._size > self._config.max_body_bytes:
            raise too_large(self._config)
        limit = self._config.max_receiving_bytes
        if self._bodies.size > limit:
            message = f"the server is receiving more than {limit} bytes at once"
            raise ApiError(429, message, code="receiving_full", retry_after=1)

    def close(self) -> None:
        """Note that it is whole, or that no more of it is wanted. Idempotent."""
        if not self._complete:
            self._complete = True
            self._bodies.size -= self._size


def too_large(config: ServiceConfig) -> ApiError:
    return ApiError(413, f"the body is larger than {config.max_body_bytes} bytes", code="body_too_large")
