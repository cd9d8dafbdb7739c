"""A client of an ASGI app in the same event loop, message by message, that may leave or stall."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

from starlette.types import ASGIApp, Message


class AsgiClient:
    """One connection. `start` runs the app in a task; `sent` is what it has sent so far."""

    def __init__(self, app: ASGIApp, path: str, headers: dict[str, str], **scope: Any) -> None:
        given = {"host": "localhost:8000"} | headers
        self.scope: dict[str, Any] = {
            "http_version": "1.1",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "state": {},
            **scope,
        }
        self._app = app
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        self.left = False
        self.readable = asyncio.Event()  # cleared: the client does not read, and sends block
        self.readable.set()
        self._changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def start(self) -> Self:
        async def run() -> None:
            await self._app(self.scope, self._incoming.get, self._send)

        self.task = asyncio.get_running_loop().create_task(run())
        self.task.add_done_callback(lambda _: self._changed.set())
        return self

    async def _send(self, message: Message) -> None:
        await self.readable.wait()
        self.sent.append(message)
        self._changed.set()

    async def until_true(self, condition: Callable[[], object]) -> None:
        """Of what has been sent. Fails if the app ends without it."""
        while not condition():
            assert self.task is not None and not self.task.done(), f"it never came: {self.sent}"
            self._changed.clear()
            await self._changed.wait()


def named_headers(headers: dict[str, str]) -> dict[str, str]:
    """As keywords spell them: content_type is content-type."""
    return {name.replace("_", "-"): value for name, value in headers.items()}
