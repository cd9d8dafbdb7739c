"""An HTTP server that answers every request with bytes that the test wrote."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    """What comes back, piece by piece, once `after` is set; the connection may close then, whole or not."""

    pieces: list[bytes]
    closes: bool = False
    after: asyncio.Event | None = None


@dataclass
class Asked:
    """One request as the server read it, and how many were under way on all connections just then."""

    path: str
    headers: dict[str, str]
    body: Any
    at_once: int
    connection: int


@dataclass
class ScriptedServer:
    reply: Callable[[Asked], Reply]
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    at_once: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection = self.connections
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                raw = await reader.readexactly(int(headers.get("content-length", "0")))
                self.at_once += 1
                asked = Asked(
                    first.split()[1], headers, json.loads(raw) if raw else None, self.at_once, connection
                )
                self.asked.append(asked)
                reply = self.reply(asked)
                if reply.after is not None:
                    await reply.after.wait()
                for piece in reply.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)  # so that pieces are read one by one more often than not
                self.at_once -= 1
                if reply.closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def scripted_server(reply: Callable[[Asked], Reply]) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer(reply)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()[:2]
    server.url = f"http://{host}:{port}"
    async with listening:
        yield server


def events(texts: list[str], *, prompt_tokens: int = 5, cached: int = 0, chat: bool = False) -> bytes:
    """An event stream with a token a text, as an OpenAI-compatible server writes it."""
    datas: list[Any] = []
    if chat:
        datas.append({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for text in texts:
        piece = {"delta": {"content": text}} if chat else {"text": text}
        datas.append({"choices": [{"index": 0, "finish_reason": None, **piece}], "usage": None})
    end = {"delta": {}} if chat else {"text": ""}
    datas.append({"choices": [{"index": 0, "finish_reason": "length", **end}]})
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(texts)}
    datas.append({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}}})
    lines = [f"data: {json.dumps(data)}\n\n" for data in datas]
    return "".join([": a comment\n\n", *lines, "data: [DONE]\n\n"]).encode()


def chunked(body: bytes, size: int) -> list[bytes]:
    """A whole answer in HTTP chunks of `size` bytes, wherever they fall."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return [head, *(b"%x\r\n%b\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


def plain(status: str, body: bytes, headers: str = "") -> list[bytes]:
    return [f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body]
