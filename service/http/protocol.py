"""uvicorn's HTTP protocol with limits on headers and on silence, and a way to drop a connection.

Apps find in `scope["state"]` how to drop it, `abort()`, and a future of its end, `gone`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.service.config import ServiceConfig
from quire.service.errors import bad_value, not_ready
from quire.service.http.close_delimited import CloseDelimited
from quire.service.http.declined_upgrade import declines, head_without_upgrade, parser_for
from quire.service.http.descriptors import most_connections, raise_limit

log = logging.getLogger("quire.service")

_UNREADABLE = (
    "this is no HTTP/1.1 request that can be read: send its line, headers and body as RFC 9112 has them"
)


def _closing(status: bytes, body: bytes, more: bytes = b"") -> bytes:
    """Return an answer after which the connection ends; `more` headers end in line ends."""
    head = (
        b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%bconnection: close\r\ncontent-length: %d\r\n\r\n"
    )
    return head % (status, more, len(body)) + body


_FULL_BODY = not_ready("the server has as many connections as it can hold").body()
_FULL = _closing(b"503 Service Unavailable", _FULL_BODY, b"retry-after: 1\r\n")
_BYTES_PER_TIMEOUT = 1 << 20  # a client that reads more slowly than so much in each `send_timeout` is cut


def bounded_protocol(config: ServiceConfig) -> type[BoundedHttpProtocol]:
    """For uvicorn's `http` setting. One connection too many gets a 503 and is closed."""

    class Bounded(BoundedHttpProtocol):
        limits = replace(config, max_connections=most_connections(config.max_connections, raise_limit()))

    return Bounded


class _Parting:
    """A transport as an answer sees it: to write is `write`, and to close it is to `part`."""

    def __init__(
        self, transport: asyncio.Transport, write: Callable[[bytes], None], part: Callable[[], None]
    ) -> None:
        self.write, self.is_closing, self.close = write, transport.is_closing, part


class BoundedHttpProtocol(HttpToolsProtocol):
    """A connection ends when its client takes too long over headers, the rest of a body, or an answer.

    Headers must be whole within `receive_timeout` and `max_header_bytes`. While an answer is made, its app
    sees to the body. What is left of a request when its answer is out has `receive_timeout`, too: between
    requests, a timer always runs. A trailer is no header: it is dropped, and bounded as headers are.
    What waits for a client to read it has `send_timeout` for each MiB of it.

    An answer that is the last one closes the connection once its request has come whole. What comes on a
    closed one has it reset, by which a client that still sends would lose the answer.
    """

    limits: ServiceConfig
    draining = False  # each answer is the last one on its connection

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_probed = False  # whether somebody asks on it if the server is ready
        self._unused_bytes = 0  # that have come since the last piece of a body, or the last whole headers
        self._receive_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._in_headers = True
        self._parts = False  # the last answer is out
        self._declined = False  # the head that was read last is to be read again, without its upgrade
        self._gone = self.loop.create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.write(_FULL)
            transport.close()
        else:
            self._expect_rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)
        self._gone.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._in_headers and self._receive_timer is None:
            self._expect_rest()
        self._unused_bytes += len(data)
        self._unset_keepalive_if_required()
        self._read(data)
        if self._unused_bytes > self.limits.max_header_bytes:
            self.transport.abort()

    def _read(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.logger.warning("a request is refused: it is no HTTP/1.1 that can be read")
            self.send_400_response(_UNREADABLE)
        except httptools.HttpParserUpgrade as upgrade:
            if self._declined:
                head = head_without_upgrade(self.parser, self.url, self.headers)
                self.parser, self._declined = parser_for(self), False
                self._read(head + data[upgrade.args[0] :])
            elif self._should_upgrade():
                self.handle_websocket_upgrade()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._parts:  # of a further request
            return
        self._declined = declines(self.parser) and not self._should_upgrade()
        if self._declined:
            return
        self._stop_receive_timer()
        self._unset_keepalive_if_required()
        self._in_headers = False
        self._unused_bytes = 0
        self.scope["state"]["abort"] = self.transport.abort
        self.scope["state"]["gone"] = self._gone
        super().on_headers_complete()
        self.is_probed = self.is_probed or self.scope.get("path") == "/ready"
        if self.cycle is not None:
            write: Callable[[bytes], None] = self.transport.write
            if self.parser.get_http_version() == "1.0":
                write = CloseDelimited(write).write
                self.cycle.waiting_for_100_continue = False  # which that version does not know, either
            self.cycle.transport = _Parting(self.transport, write, self._part)  # type: ignore[assignment]
            if self.draining:
                self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._unused_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._declined:
            return
        super().on_message_complete()
        if self._parts:
            self.transport.close()
        if not self.pipeline:
            self.flow.resume_reading()  # a long body may have paused it, and who answers may read no more
        self._in_headers = True
        self._unused_bytes = 0
        self._stop_receive_timer()
        if self._is_answered and not (self.parser.should_upgrade() and self._should_upgrade()):
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_reader()
        if self._is_answered and not self._in_headers and self._receive_timer is None:
            self._expect_rest()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, whose path nobody knows, as OpenAI's API words it; `msg`: why."""
        refusal = bad_value(None, msg, "invalid_http").body()
        self.transport.write(_closing(b"400 Bad Request", refusal))
        self.transport.close()
        self._expect_reader()

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection to another protocol."""
        self._stop_timers()
        super().handle_websocket_upgrade()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._expect_reader()

    def _part(self) -> None:
        """Close the connection, or say that nothing more is sent and wait for the rest of the request."""
        if self._in_headers or self.transport.is_closing():
            self.transport.close()
            return
        self._parts = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self._receive_timer is None:
            self._expect_rest()

    @property
    def has_unsent(self) -> bool:
        """Return whether bytes of an answer wait for the client to read."""
        return self.transport.get_write_buffer_size() > 0

    @property
    def _is_answered(self) -> bool:
        """Return whether nothing is being answered."""
        return self.cycle is not None and self.cycle.response_complete

    def _expect_rest(self) -> None:
        self._receive_timer = self.loop.call_later(self.limits.receive_timeout, self.transport.abort)

    def _expect_reader(self) -> None:
        """Give the client time, from now on, for what it has not read yet."""
        if self._send_timer is not None:
            self._send_timer.cancel()
        size = self.transport.get_write_buffer_size()
        seconds = self.limits.send_timeout * max(1.0, size / _BYTES_PER_TIMEOUT)
        self._send_timer = self.loop.call_later(seconds, self._check_reader)

    def _check_reader(self) -> None:
        """Cut a client that reads no more. Of an answer that goes on, a little may always be on its way."""
        self._send_timer = None
        stuck = self.flow.write_paused or self._is_answered or self.transport.is_closing()
        if stuck and self.transport.get_write_buffer_size():
            log.info("a client is cut: it stopped reading")
            self.transport.abort()

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _stop_timers(self) -> None:
        self._stop_receive_timer()
        self._unset_keepalive_if_required()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
