"""A handler of requests as an ASGI app, of one method."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.service.errors import ApiError

State = TypeVar("State")
Handler = Callable[[State, Request], Awaitable[Response]]


class Endpoint(Generic[State]):
    """Answer one method. The gate words its errors, and the server leaves out the body for a HEAD."""

    def __init__(self, state: State, handler: Handler[State], method: str) -> None:
        self._state = state
        self._handler = handler
        self._methods = ("GET", "HEAD") if method == "GET" else (method,)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in self._methods:
            message = f"{scope['path']} does not take {scope['method']}, but {self._methods[0]}"
            raise ApiError(405, message, allow=", ".join(self._methods))
        response = await self._handler(self._state, Request(scope, receive))
        await response(scope, receive, send)
