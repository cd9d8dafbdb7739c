"""A small HTTP/1.1 client that hands over the bytes of an answer with the time at which they came."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import httptools

OnBody = Callable[[bytes, float], None]
"""Takes a piece of an answer's body and when it came, in seconds of `time.monotonic`."""


NO_HEADERS: Mapping[str, str] = {}


class Disconnected(ConnectionError):
    """The server closed the connection before the answer was whole."""


class _Connection(asyncio.Protocol):
    """One exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.is_open = False
        self._parser: httptools.HttpResponseParser
        self._on_body: OnBody = _ignore
        self._refusal = b""  # the body, if the status is not 200
        self._done: asyncio.Future[tuple[int, bytes]] | None = None
        self._answered = False  # a byte of the answer has come
        self._now = 0.0

    async def exchange(self, request: bytes, on_body: OnBody) -> tuple[int, bytes]:
        """Send, and return status and refusal once the body is whole."""
        self._parser = httptools.HttpResponseParser(self)
        self._on_body = on_body
        self._refusal = b""
        self._answered = False
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._done

    @property
    def unanswered(self) -> bool:
        return not self._answered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error.__context__ or error)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._fail(exc or Disconnected("the server closed the connection"))

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() == 200:
            self._on_body(body, self._now)
        else:
            self._refusal += body

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # 100 Continue and the like
            return
        if not self._parser.should_keep_alive():
            self.is_open = False
            self.transport.close()
        if self._done is not None and not self._done.done():
            self._done.set_result((self._parser.get_status_code(), self._refusal))

    def _fail(self, error: BaseException) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class HttpClient:
    """Requests to one server, over connections that are kept and used again."""

    def __init__(self, base_url: str, headers: dict[str, str], timeout: float) -> None:
        """Raise ValueError for a URL that is not http or https."""
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"the server's URL must begin with http:// or https://, got {base_url!r}")
        self._host = url.hostname
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._path = url.path.rstrip("/")
        self._head = _lines({"Host": url.netloc.rpartition("@")[2], **headers})
        self._timeout = timeout
        self._idle: list[_Connection] = []

    async def post(
        self, path: str, body: bytes, on_body: OnBody, headers: Mapping[str, str] = NO_HEADERS
    ) -> tuple[int, bytes]:
        """Return the status, and the body if the status is not 200; else its pieces have gone to `on_body`.

        Raise OSError (Disconnected, too), TimeoutError, HttpParserError, or what `on_body` raised.
        """
        more = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
        return await self._send("POST", path, _lines(more) + b"\r\n" + body, on_body)

    async def follow(self, path: str, on_body: OnBody, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Do as `post`, by GET."""
        return await self._send("GET", path, _lines(headers) + b"\r\n", on_body)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body; raise as `post` does."""
        pieces: list[bytes] = []
        status, refusal = await self._send("GET", path, b"\r\n", lambda piece, _: pieces.append(piece))
        return status, b"".join(pieces) or refusal

    def close(self) -> None:
        for connection in self._idle:
            connection.transport.close()

    async def _send(self, method: str, path: str, rest: bytes, on_body: OnBody) -> tuple[int, bytes]:
        request = f"{method} {self._path}{path} HTTP/1.1\r\n".encode() + self._head + rest
        async with asyncio.timeout(self._timeout):
            while self._idle:
                kept = self._idle.pop()
                if not kept.is_open:
                    continue
                try:
                    return await self._exchange(kept, request, on_body)
                except ConnectionError:
                    if not kept.unanswered:
                        raise
                    # The server closed it while it was idle, and has not seen this request.
            return await self._exchange(await self._connect(), request, on_body)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        return connection

    async def _exchange(self, connection: _Connection, request: bytes, on_body: OnBody) -> tuple[int, bytes]:
        try:
            answer = await connection.exchange(request, on_body)
        except BaseException:
            connection.transport.abort()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return answer


def _lines(headers: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()


def _ignore(_: bytes, __: float) -> None:
    """Drop a body: no exchange is under way."""
