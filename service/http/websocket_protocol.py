"""uvicorn's WebSocket protocol, made to end whatever the client does, and to keep queries out of the log."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

_log = logging.getLogger("quire.websocket")
_log.setLevel(logging.WARNING)  # uvicorn's notices have the query string, where some put keys


class OrderlyWebSocketProtocol(WebSocketsSansIOProtocol):
    """For uvicorn's `ws` setting. A frame over `ws_max_size`, fragments together, closes with 1009."""

    linger_seconds = 10.0  # for which a client may read what was said last

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = self.conn.logger = _log
        self.conn.debug = False  # it would log all headers

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # A handshake that could not be read: uvicorn would leave it without an answer, and open.
            refusal = b"".join(self.conn.data_to_send())
            self.transport.write(refusal or _refusal(self.conn.handshake_exc))
            self.transport.close()

    def handle_connect(self, event: Request) -> None:
        """Give the app a way to drop the connection: a plain close waits until all has been read."""
        super().handle_connect(event)
        if self.response.status_code == 101:
            self.scope["state"]["abort"] = self.transport.abort

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.initial_response is not None:  # else uvicorn takes the app's refusal for a bug, and says so
            self.handshake_complete = True

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """Abort in a while what the close leaves open: it waits for the client to read what is left."""
        super().on_task_complete(task)
        self.loop.call_later(self.linger_seconds, self.transport.abort)

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()  # and so the app hears of it


def _refusal(error: Exception) -> bytes:
    """Return what is answered to a handshake that the library finds no words for, such as one with a body."""
    text = f"Failed to open a WebSocket connection: {error.__cause__ or error}.\n".encode()
    return (
        b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain; charset=utf-8\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(text), text)
    )
