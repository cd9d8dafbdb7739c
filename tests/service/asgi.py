"""Requests to an ASGI app in the same event loop."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Self

from starlette.types import ASGIApp

from tests.service.asgi_client import AsgiClient, named_headers


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


class Exchange(AsgiClient):
    """One request."""

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
        super().__init__(
            app,
            path,
            headers or {},
            type="http",
            method=method,
            scheme="http",
            server=("127.0.0.1", 8000),
            client=("127.0.0.1", 9999),
        )
        self.scope["state"]["abort"] = self.leave
        parts = body if isinstance(body, list) else [body]
        for at, part in enumerate(parts):
            more = at < len(parts) - 1 or not whole
            self._incoming.put_nowait({"type": "http.request", "body": part, "more_body": more})

    def start(self) -> Self:
        self.scope["state"]["gone"] = self._gone = asyncio.get_running_loop().create_future()
        return super().start()

    def leave(self) -> None:
        if not self.left:
            self.left = True
            self._incoming.put_nowait({"type": "http.disconnect"})
            self._gone.set_result(None)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def until(self, text: bytes) -> None:
        """Waits for `text` in the body. Fails if the app ends without it."""
        await self.until_true(lambda: text in self.body)

    async def finish(self) -> Reply:
        assert self.task is not None
        await self.task
        start = self.sent[0]
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return Reply(start["status"], headers, self.body)


def exchange(app: ASGIApp, path: str, body: dict[str, Any] | bytes, **headers: str) -> Exchange:
    """A POST of JSON, started."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"content-type": "application/json"} | named_headers(headers)
    return Exchange(app, "POST", path, data, given).start()


async def post(app: ASGIApp, path: str, body: dict[str, Any] | bytes, **headers: str) -> Reply:
    return await exchange(app, path, body, **headers).finish()


async def get(app: ASGIApp, path: str, **headers: str) -> Reply:
    return await Exchange(app, "GET", path, b"", named_headers(headers)).start().finish()


async def settle() -> None:
    """Let tasks that are ready do what they can."""
    for _ in range(30):
        await asyncio.sleep(0)
