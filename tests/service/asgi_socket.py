"""Talks to an ASGI app over a WebSocket in the same event loop, as a client that may leave or stall."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message


class Socket:
    """One WebSocket, opened by `start`. `events` is what has come so far."""

    def __init__(self, app: ASGIApp, **headers: str) -> None:
        given = {"host": "localhost:8000"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        self.scope: dict[str, Any] = {
            "type": "websocket",
            "http_version": "1.1",
            "path": "/v1/responses",
            "raw_path": b"/v1/responses",
            "query_string": b"",
            "root_path": "",
            "scheme": "ws",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "subprotocols": [],
            "state": {"abort": self.leave},
            "extensions": {"websocket.http.response": {}},
        }
        self._app = app
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "websocket.connect"})
        self.sent: list[Message] = []
        self.left = False
        self.readable = asyncio.Event()  # cleared: the client does not read, and sends block
        self.readable.set()
        self._changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def start(self) -> Socket:
        async def run() -> None:
            await self._app(self.scope, self._incoming.get, self._send)

        self.task = asyncio.get_running_loop().create_task(run())
        self.task.add_done_callback(lambda _: self._changed.set())
        return self

    async def _send(self, message: Message) -> None:
        await self.readable.wait()
        if self.left:
            raise OSError("the client is gone")
        self.sent.append(message)
        self._changed.set()

    def say(self, event: dict[str, Any] | str | bytes) -> None:
        key = "bytes" if isinstance(event, bytes) else "text"
        data = json.dumps(event) if isinstance(event, dict) else event
        self._incoming.put_nowait({"type": "websocket.receive", key: data})

    def create(self, text: str = "hello", **fields: Any) -> None:
        self.say({"type": "response.create", "input": text, **fields})

    def cancel(self, response_id: str) -> None:
        self.say({"type": "response.cancel", "response_id": response_id})

    def leave(self) -> None:
        self.left = True
        self.readable.set()
        self._incoming.put_nowait({"type": "websocket.disconnect", "code": 1006})

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(message["text"]) for message in self.sent if message["type"] == "websocket.send"]

    @property
    def close_code(self) -> int | None:
        return next((message["code"] for message in self.sent if message["type"] == "websocket.close"), None)

    async def until(self, condition: Callable[[list[dict[str, Any]]], object]) -> list[dict[str, Any]]:
        """Waits for events of which `condition` is true. Fails if the app ends without them."""
        while not condition(self.events):
            assert self.task is not None and not self.task.done(), f"it never came: {self.events}"
            self._changed.clear()
            await self._changed.wait()
        return self.events

    async def until_type(self, kind: str, count: int = 1) -> dict[str, Any]:
        """The `count`-th event of this type."""

        def found(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [event for event in events if event["type"] == kind]

        await self.until(lambda events: len(found(events)) >= count)
        return found(self.events)[count - 1]
