"""uvicorn's WebSocket protocol, made to end whatever the client does, and to keep queries out of the log."""

from __future__ import annotations

import logging
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

LINGER_SECONDS = 1.0  # for a client to read why it is cut

_log = logging.getLogger("quire.websocket")
_log.setLevel(logging.WARNING)  # uvicorn's notices have the query string, where some put keys


class OrderlyWebSocketProtocol(WebSocketsSansIOProtocol):
    """For uvicorn's `ws` setting. A frame over `ws_max_size`, fragments together, closes with 1009."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _log

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # A handshake that could not be read: uvicorn would leave it without an answer, and open.
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def handle_connect(self, event: Request) -> None:
        """The app gets a way to drop the connection: a plain close waits until all has been read."""
        super().handle_connect(event)
        if self.response.status_code == 101:
            self.scope["state"]["abort"] = self.transport.abort

    def handle_parser_exception(self) -> None:
        """A close while the client still sends would reset the connection, and it would not see our code."""
        if self.close_sent:
            return
        close = self.conn.close_sent
        assert close is not None
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close.code, "reason": close.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)
