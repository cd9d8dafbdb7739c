"""A handler of requests as an ASGI app, of one method or several."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.service.errors import ApiError

State = TypeVar("State")
READING = ("GET", "HEAD")
Handler = Callable[[State, Request], Awaitable[Response]]


def check_method(scope: Scope, methods: Sequence[str]) -> None:
    """Raises ApiError 405 unless the request's is one of these."""
    if scope["method"] not in methods:
        taken = " or ".join(method for method in methods if method != "HEAD")
        message = f"{scope['path']} does not take {scope['method']}, but {taken}"
        raise ApiError(405, message, allow=", ".join(methods))


class Endpoint(Generic[State]):
    """Answer these methods. The gate words its errors, and the server leaves out the body for a HEAD."""

    def __init__(self, state: State, handler: Handler[State], *methods: str) -> None:
        self._state = state
        self._handler = handler
        self._methods = READING if methods == ("GET",) else methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_method(scope, self._methods)
        response = await self._handler(self._state, Request(scope, receive))
        await response(scope, receive, send)


class Counted:
    """An ASGI app whose answers the gate counts under its path."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["endpoint"] = self._path
        await self._app(scope, receive, send)
