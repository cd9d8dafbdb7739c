"""The handlers of one path as an ASGI app."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.service.errors import ApiError

State = TypeVar("State")
Handler = Callable[[State, Request], Awaitable[Response]]


class Endpoint(Generic[State]):
    """Answer some methods. The gate words its errors, and the server leaves out the body for a HEAD."""

    def __init__(self, state: State, handlers: Mapping[str, Handler[State]]) -> None:
        """By method; who answers a GET answers a HEAD."""
        self._state = state
        self._handlers = dict(handlers)
        if "GET" in handlers:
            self._handlers["HEAD"] = handlers["GET"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["method"])
        if handler is None:
            known = [method for method in self._handlers if method != "HEAD"]
            message = f"{scope['path']} does not take {scope['method']}, but {' and '.join(known)}"
            raise ApiError(405, message, allow=", ".join(self._handlers))
        response = await handler(self._state, Request(scope, receive))
        await response(scope, receive, send)


class Counted:
    """An ASGI app whose answers the gate counts under its path."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["endpoint"] = self._path
        await self._app(scope, receive, send)
