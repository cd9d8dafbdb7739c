"""Frames a second of the chat page in Chromium, while a long answer streams in.

The answer has headings, lists, tables, code and formulas, and comes as a server sends it, token by token.
Counts the frames that the browser has shown meanwhile, all of them and those of the last quarter, where the
answer is long. It needs playwright and a Chromium.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvicorn
from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quire.loadtest.command import command_parser, write_json
from quire.service.http.static import page_files

MODEL = "scripted"
TOKEN = 4  # characters
COUNTS_PERIOD = 0.25  # seconds between two counts of blocks
SECTION = '''## Part {n}

A block table maps the logical blocks of a sequence to physical ones, so that **part {n}** needs no contiguous
memory; see `engine/memory/manager.py` and [the paper](https://arxiv.org/abs/2309.06180).

- blocks are counted, shared and copied on write
- a sequence wastes less than one block
  1. of {n} tokens, or fewer
  2. in each of its tables

| blocks | tokens | share |
|---|--:|:-:|
| {n} | {m} | 1 |
| 8 | 128 | 0.5 |
| 16 | 256 | 0.25 |

```python
def attend(query: Tensor, blocks: list[int], part: int = {n}) -> Tensor:
    """Attend to the keys of each block in turn."""
    scores = [query @ keys(block).T / math.sqrt(query.shape[-1]) for block in blocks]
    return torch.softmax(torch.cat(scores), dim=-1) @ torch.cat([values(block) for block in blocks])
```

The attention of a query $q_{n}$ is

$$\\mathrm{{softmax}}\\left(\\frac{{q_{n} K^\\top}}{{\\sqrt{{d}}}}\\right) V
= \\sum_{{j=1}}^{{{n}}} a_{{{n}j}} v_j$$

> Whoever shares a block pays for it once.

'''
# Waits until the answer comes, and returns the milliseconds between frames until it has ended.
FOLLOW = """async () => {
    const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
    while (!document.querySelector(".answer.streaming .prose > *")) await frame();
    const times = [];
    while (document.querySelector(".answer.streaming")) times.push(await frame());
    return times.slice(1).map((time, i) => time - times[i]);
}"""


@dataclass(frozen=True)
class Measured:
    gaps: list[float]  # milliseconds between two frames
    shown: int  # characters of the answer that the page shows at the end


class ScriptedServer:
    """Answers as a server does whose engine gives so many tokens a second."""

    def __init__(self, characters: int, tokens_per_second: float) -> None:
        sections = "".join(SECTION.format(n=n, m=16 * n) for n in range(1, 2 + characters // len(SECTION)))
        self.text = sections[:characters]
        self._pause = 1 / tokens_per_second

    def app(self) -> Starlette:
        def page(path: str, handler: Any) -> Route:
            async def answer(request: Request) -> Response:
                response: Response = await handler(None, request)
                return response

            return Route(path, answer)

        return Starlette(
            routes=[
                *(page(path, handler) for path, handler in page_files()),
                Route("/startup", self._startup),
                Route("/v1/models", self._models),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/blocks/events", self._blocks),
                Route("/v1/blocks/own", self._own),
                Route("/v1/chat/completions", self._answer, methods=["POST"]),
            ]
        )

    async def _startup(self, request: Request) -> Response:
        async def phases() -> AsyncIterator[str]:
            yield '{"phase": "ready", "done": 1, "total": 1, "unit": "model", "seconds": 0.5}'

        return EventSourceResponse(phases())

    async def _models(self, request: Request) -> Response:
        model = {"id": MODEL, "object": "model", "max_model_len": 1 << 17}
        return JSONResponse({"object": "list", "data": [model]})

    async def _tokenize(self, request: Request) -> Response:
        return JSONResponse({"tokens": [0]})

    async def _own(self, request: Request) -> Response:
        return JSONResponse({"active": 40, "shared": 2, "cached": 0, "host": 0})

    async def _blocks(self, request: Request) -> Response:
        async def counts() -> AsyncIterator[str]:
            active = 0
            while True:
                active += 1
                yield msgspec.json.encode(
                    {"active": active, "cached": 40, "free": 1960 - active, "block_size": 16}
                ).decode()
                await asyncio.sleep(COUNTS_PERIOD)

        return EventSourceResponse(counts())

    async def _answer(self, request: Request) -> Response:
        async def tokens() -> AsyncIterator[str]:
            due = time.monotonic()
            for at in range(0, len(self.text), TOKEN):
                yield _chunk({"content": self.text[at : at + TOKEN]}, None)
                due += self._pause
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            yield _chunk({}, "stop")
            yield "[DONE]"

        return EventSourceResponse(tokens(), headers={"X-Request-Id": "measured"})


def _chunk(delta: dict[str, str], finish_reason: str | None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return msgspec.json.encode({"object": "chat.completion.chunk", "choices": [choice]}).decode()


def measure(url: str, seconds: float, picture: Path | None) -> Measured:
    """Ask on the page at `url`, and follow the answer for as long as it streams, `seconds` at most."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(1000 * seconds)
        page.goto(url)
        page.locator("#suggestions button").first.click()
        gaps: list[float] = page.evaluate(FOLLOW)
        shown = len(page.locator(".answer .prose").inner_text())
        if picture is not None:
            page.screenshot(path=picture)
        browser.close()
    return Measured(gaps, shown)


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--characters", type=int, default=24_000, help="of the answer")
    parser.add_argument("--tokens-per-second", type=float, default=100.0)
    parser.add_argument("--screenshot", type=Path, help="a PNG of the page at the end")
    parser.add_argument("--result-file", type=Path, help="write one JSON object")
    arguments = parser.parse_args()
    scripted = ScriptedServer(arguments.characters, arguments.tokens_per_second)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(scripted.app(), log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    patience = 60 + 4 * arguments.characters / TOKEN / arguments.tokens_per_second
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        measured = measure(url, patience, arguments.screenshot)
    finally:
        server.should_exit = True
        thread.join()
    gaps = np.array(measured.gaps)
    last = gaps[-len(gaps) // 4 :]
    result = {
        "characters": arguments.characters,
        "characters_shown": measured.shown,
        "tokens_per_second": arguments.tokens_per_second,
        "seconds": round(float(gaps.sum()) / 1000, 1),
        "frames_per_second": round(1000 / float(gaps.mean()), 1),
        "frames_per_second_of_the_last_quarter": round(1000 / float(last.mean()), 1),
        "p99_frame_ms": round(float(np.percentile(gaps, 99)), 1),
        "worst_frame_ms": round(float(gaps.max()), 1),
    }
    print(msgspec.json.encode(result).decode())
    if arguments.result_file is not None:
        write_json(arguments.result_file, f"Chromium without a GPU, {os.cpu_count()} cores", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
