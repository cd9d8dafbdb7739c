"""The memory that all requests that are not answered yet hold in the router together."""

from __future__ import annotations

from starlette.requests import Request

from quire.service.errors import ApiError


class HeldBytes:
    """Bodies, which may have to be sent again, and answers that are not whole yet."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0


class Share:
    """The memory that one request holds. Use with `with`."""

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self._size = 0

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back(self._size)

    def take(self, size: int) -> None:
        """Raises ApiError 429."""
        limit = self._held.limit
        if self._held.size + size > limit:
            message = f"the router holds as much of other requests and answers as it may: {limit} bytes"
            raise ApiError(429, message, code="router_full", retry_after=1)
        self._held.size += size
        self._size += size

    def give_back(self, size: int) -> None:
        self._held.size -= size
        self._size -= size


async def read_body(request: Request, share: Share) -> bytes:
    """Return the body, which the request itself would keep for as long as it lives. Raises ApiError 429."""
    chunks = []
    async for chunk in request.stream():
        share.take(len(chunk))
        chunks.append(chunk)
    return b"".join(chunks)
