"""The least that a Starlette app can do for a stream of events: what our streaming is measured beside.

`python -m quire.loadtest.servers.plain_stream PORT TOKENS json|bytes` answers each POST with so many events
of one token, each written by the json module, or ready-made bytes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

CHUNK = {
    "object": "text_completion",
    "id": "cmpl-00000000000000000000000000000000",
    "created": 1795244165,
    "model": "none",
    "choices": [{"index": 0, "text": " that", "logprobs": None, "finish_reason": None}],
}
EVENT = b"data: " + json.dumps(CHUNK, separators=(",", ":")).encode() + b"\n\n"


def create_app(tokens: int, encode: bool) -> Starlette:
    async def events() -> AsyncIterator[bytes]:
        for _ in range(tokens):
            await asyncio.sleep(0)  # the next token comes in another turn of the loop
            yield b"data: " + json.dumps(CHUNK).encode() + b"\n\n" if encode else EVENT
        yield b"data: [DONE]\n\n"

    async def answer(request: Request) -> StreamingResponse:
        await request.body()
        return StreamingResponse(events(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])


def main() -> None:
    port, tokens, form = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    uvicorn.run(create_app(tokens, form == "json"), port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
