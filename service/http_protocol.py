"""uvicorn's HTTP protocol with limits on headers, a way to drop a connection, and word of when it is lost.

Apps find the last two in `scope["state"]`: `abort()`, and the future `gone`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.config import ServiceConfig
from service.descriptors import most_connections, raise_limit
from service.errors import not_ready

_FULL_BODY = not_ready("the server has as many connections as it can hold").body()
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(_FULL_BODY), _FULL_BODY)
)


def bounded_protocol(config: ServiceConfig) -> type[BoundedHttpProtocol]:
    """For uvicorn's `http` setting. One connection too many gets a 503 and is closed."""

    class Bounded(BoundedHttpProtocol):
        limits = replace(config, max_connections=most_connections(config.max_connections, raise_limit()))

    return Bounded


class BoundedHttpProtocol(HttpToolsProtocol):
    """Headers must be whole within `receive_timeout` and `max_header_bytes`, or the connection ends."""

    limits: ServiceConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._in_headers = True
        self._gone = self.loop.create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.write(_FULL)
            transport.close()
        else:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._gone.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            if self._header_timer is None:
                self._expect_headers()
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > self.limits.max_header_bytes:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_headers = False
        self.scope["state"]["abort"] = self.transport.abort
        self.scope["state"]["gone"] = self._gone
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.pipeline:
            self.flow.resume_reading()  # a long body may have paused it, and who answers may read no more
        self._in_headers = True
        self._header_bytes = 0

    def _expect_headers(self) -> None:
        self._header_timer = self.loop.call_later(self.limits.receive_timeout, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
