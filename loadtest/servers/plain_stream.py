"""The least that an app can do for a stream of events: what our streaming is measured beside.

`python -m quire.loadtest.servers.plain_stream PORT TOKENS KIND` answers each POST with so many events of one
token. The kinds json and bytes are Starlette apps, which write each event with the json module, or send
ready-made bytes; starlette, sse-starlette and connection are bare routes that send ready-made bytes by
starlette's own response, by sse-starlette's and by the service's `Connection`. With 0 tokens a stream has one
event, and then waits. GET /ended lists when streams were left, by the system's monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator

import uvicorn
from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.service.config import ServiceConfig
from quire.service.http.connection import ClientGone, Connection
from quire.service.http.eager import start_eagerly
from quire.service.http.protocol import bounded_protocol

CHUNK = {
    "object": "text_completion",
    "id": "cmpl-00000000000000000000000000000000",
    "created": 1795244165,
    "model": "none",
    "choices": [{"index": 0, "text": " that", "logprobs": None, "finish_reason": None}],
}
EVENT = b"data: " + json.dumps(CHUNK, separators=(",", ":")).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"
CONFIG = ServiceConfig(served_model_names=("none",))


class ConnectionResponse(Response):
    """`tokens` events, one in each turn of the loop, by the service's own connection."""

    def __init__(self, tokens: int, ended: list[float]) -> None:
        self._tokens = tokens
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with Connection(scope, send, CONFIG) as connection:
                connection.keep_alive()
                for _ in range(self._tokens or 1):
                    await asyncio.sleep(0)
                    rest = start_eagerly(connection.write(EVENT))
                    if rest is not None:
                        await rest
                if not self._tokens:
                    await asyncio.Event().wait()
                await connection.write(DONE, last=True)
        except ClientGone:
            self._ended.append(time.monotonic())


def create_app(tokens: int, form: str) -> ASGIApp:
    ended: list[float] = []

    async def events() -> AsyncIterator[bytes]:
        try:
            for _ in range(tokens or 1):
                await asyncio.sleep(0)  # the next token comes in another turn of the loop
                yield b"data: " + json.dumps(CHUNK).encode() + b"\n\n" if form == "json" else EVENT
            if not tokens:
                await asyncio.Event().wait()
            yield DONE
        except asyncio.CancelledError:
            ended.append(time.monotonic())
            raise

    async def answer(request: Request) -> Response:
        await request.body()
        if form == "connection":
            return ConnectionResponse(tokens, ended)
        if form == "sse-starlette":
            return EventSourceResponse(
                events(), sep="\n", ping=CONFIG.keep_alive, send_timeout=CONFIG.send_timeout
            )
        return StreamingResponse(events(), media_type="text/event-stream")

    async def list_ended(request: Request) -> Response:
        return JSONResponse(ended)

    routes = [Route("/v1/completions", answer, methods=["POST"]), Route("/ended", list_ended)]
    return Starlette(routes=routes) if form in ("json", "bytes") else Router(routes)


def main() -> None:
    port, tokens, form = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    uvicorn.run(
        create_app(tokens, form),
        port=port,
        log_level="warning",
        access_log=False,
        http=bounded_protocol(CONFIG) if form == "connection" else "auto",
    )


if __name__ == "__main__":
    main()
