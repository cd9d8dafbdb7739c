"""The least that an event loop can do for /health: `python -m quire.loadtest.chaos.control PORT`.

How long it takes says how late this machine wakes any process just now.
"""

from __future__ import annotations

import asyncio
import sys

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class _Control(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(ANSWER * data.count(b"\r\n\r\n"))


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Control, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
