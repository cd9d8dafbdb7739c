"""An app of Quire's under a server that is not: Ray's proxy has the client's connection."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Outside:
    """ASGI middleware that makes of ASGI's own words what Quire's protocol tells its apps: that the client is
    gone. To drop a client that reads no more is the proxy's affair."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def abort() -> None:
            if not gone.done():
                gone.set_result(None)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            abort()

        watching: asyncio.Task[None] | None = None

        async def receive_body() -> Message:
            """Once the body is whole, only the client's end can come."""
            nonlocal watching
            if watching is not None:
                await watching
                return {"type": "http.disconnect"}
            message = await receive()
            if message["type"] == "http.disconnect":
                abort()
            elif message["type"] == "http.request" and not message.get("more_body", False):
                watching = asyncio.create_task(watch())
            return message

        scope["state"] = {**scope.get("state", {}), "abort": abort, "gone": gone}
        try:
            await self._app(scope, receive_body if scope["type"] == "http" else receive, send)
        finally:
            if watching is not None:
                watching.cancel()


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
