"""Talks to an ASGI app in the same event loop, message by message, as a client that may leave or stall."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """Of an event stream, comments left out; the last one, [DONE], as that string."""
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == ""
        datas = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]


class Exchange:
    """One request. `start` runs the app in a task; `sent` is what it has sent so far."""

    def __init__(
        self,
        app: ASGIApp,
        method: str,
        path: str,
        body: bytes | list[bytes] = b"",
        headers: dict[str, str] | None = None,
        *,
        whole: bool = True,
    ) -> None:
        given = {"host": "localhost:8000"} | (headers or {})
        self.scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("127.0.0.1", 8000),
            "client": ("127.0.0.1", 9999),
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "state": {},
        }
        self._app = app
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        parts = body if isinstance(body, list) else [body]
        for at, part in enumerate(parts):
            more = at < len(parts) - 1 or not whole
            self._incoming.put_nowait({"type": "http.request", "body": part, "more_body": more})
        self.sent: list[Message] = []
        self.left = False
        self.readable = asyncio.Event()  # cleared: the client does not read, and sends block
        self.readable.set()
        self._changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def start(self) -> Exchange:
        async def run() -> None:
            await self._app(self.scope, self._incoming.get, self._send)

        self.task = asyncio.get_running_loop().create_task(run())
        self.task.add_done_callback(lambda _: self._changed.set())
        return self

    async def _send(self, message: Message) -> None:
        await self.readable.wait()
        self.sent.append(message)
        self._changed.set()

    def leave(self) -> None:
        self.left = True
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def until(self, text: bytes) -> None:
        """Waits for `text` in the body. Fails if the app ends without it."""
        while text not in self.body:
            assert self.task is not None and not self.task.done(), f"{text!r} never came: {self.sent}"
            self._changed.clear()
            await self._changed.wait()

    async def finish(self) -> Reply:
        assert self.task is not None
        await self.task
        start = self.sent[0]
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return Reply(start["status"], headers, self.body)


def exchange(app: ASGIApp, path: str, body: dict[str, Any] | bytes, **headers: str) -> Exchange:
    """A POST of JSON, started."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"content-type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    return Exchange(app, "POST", path, data, given).start()


async def post(app: ASGIApp, path: str, body: dict[str, Any] | bytes, **headers: str) -> Reply:
    return await exchange(app, path, body, **headers).finish()


async def get(app: ASGIApp, path: str, **headers: str) -> Reply:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return await Exchange(app, "GET", path, b"", given).start().finish()
