"""Requests that Ray has given to a replica, each from when it did until it is answered.

What is asked over HTTP is thereby an ongoing request of Ray's: it scales by their number, and lets no replica
end before they have. A lease is also what lets somebody in: a replica listens to whoever reaches its machine.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.service.errors import ApiError
from quire.service.http.codec import error_response

HEADER = b"x-quire-lease"
UNUSED_SECONDS = 10.0  # after which one ends that nobody has come with
_OPEN = frozenset({"/health", "/ready", "/metrics"})


class Lease:
    """One request's; it comes with the token in HEADER."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16).encode()
        self.is_used = False
        self.ended: Future[None] = Future()


class Leases:
    """ASGI middleware in the server's event loop; leases are made and waited for in another one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._leases: dict[bytes, Lease] = {}

    @contextmanager
    def lent(self) -> Iterator[Lease]:
        """Make one, which lets nobody in any more once the block is left."""
        lease = Lease()
        self._leases[lease.token] = lease
        try:
            yield lease
        finally:
            self._leases.pop(lease.token, None)

    async def wait(self, lease: Lease) -> None:
        """Wait until the request is answered, or nobody has come with it for long."""
        ended = asyncio.wrap_future(lease.ended)
        await asyncio.wait([ended], timeout=UNUSED_SECONDS)
        if lease.is_used:
            await asyncio.wait([ended])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = dict(scope["headers"]).get(HEADER, b"")
        lease = self._leases.pop(token, None)
        if lease is None:
            if scope["path"] in _OPEN:
                await self._app(scope, receive, send)
                return
            refusal = ApiError(403, "requests come by way of Ray's proxy, and not here", code="no_lease")
            await error_response(refusal, scope["path"])(scope, receive, send)
            return
        lease.is_used = True
        try:
            await self._app(scope, receive, send)
        finally:
            lease.ended.set_result(None)
