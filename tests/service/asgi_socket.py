"""A WebSocket to an ASGI app in the same event loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message

from tests.service.asgi_client import AsgiClient, named_headers


class Socket(AsgiClient):
    """`start` opens it. `events` is what has come so far."""

    def __init__(
        self,
        app: ASGIApp,
        path: str = "/v1/responses",
        subprotocols: tuple[str, ...] = (),
        **headers: str,
    ) -> None:
        super().__init__(
            app,
            path,
            named_headers(headers),
            type="websocket",
            scheme="ws",
            subprotocols=list(subprotocols),
            state={"abort": self.leave},
            extensions={"websocket.http.response": {}},
        )
        self._incoming.put_nowait({"type": "websocket.connect"})

    async def _send(self, message: Message) -> None:
        await self.readable.wait()
        if self.left:
            raise OSError("the client is gone")
        await super()._send(message)

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
        await self.until_true(lambda: condition(self.events))
        return self.events

    async def until_type(self, kind: str, count: int = 1) -> dict[str, Any]:
        """The `count`-th event of this type."""

        def found(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [event for event in events if event["type"] == kind]

        await self.until(lambda events: len(found(events)) >= count)
        return found(self.events)[count - 1]
