"""Frames a second of the page /blocks in Chromium, over a pool that keeps changing.

Zooms and moves the map for some seconds, while updates come as a busy server sends them, and counts the
frames that the browser has shown. It needs playwright and a Chromium.
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
from pathlib import Path

import msgspec
import numpy as np
import uvicorn
from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.engine.inspection.messages import ACTIVE, CACHED, Move, PoolAnswer, Table
from quire.loadtest.command import command_parser, write_json
from quire.service.http.static import page_files
from quire.service.inspector.feed import PERIOD
from quire.service.inspector.updates import BlockHistory

REQUESTS = 200  # that hold blocks at once
CHANGED = 400  # blocks in each update
# Waits until the map is drawn; the page's policy forbids Playwright's own way of waiting.
DRAWN = """async () => {
    while (!window.blockMap || window.blockMap.frames < 3) await new Promise((next) => setTimeout(next, 20));
}"""
# Zooms and moves the map as fast as frames come, and returns the milliseconds between them.
DRIVE = """async (seconds) => {
    const map = window.blockMap;
    const canvas = document.getElementById("map");
    const { left, top, width, height } = canvas.getBoundingClientRect();
    const times = [];
    const end = performance.now() + seconds * 1000;
    for (let i = 0; performance.now() < end; i += 1) {
        const phase = (i % 240) / 240;
        map.zoom(phase < 0.5 ? 1.03 : 1 / 1.03, width * (0.3 + 0.4 * phase), height * 0.5);
        canvas.dispatchEvent(new PointerEvent("pointermove", {
            clientX: left + width * phase, clientY: top + height * 0.5, bubbles: true,
        }));
        times.push(await new Promise((resolve) => requestAnimationFrame(resolve)));
    }
    return times.slice(1).map((time, i) => time - times[i]);
}"""


class BusyPool:
    """A pool in which requests grow, end and begin."""

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._states = self._rng.choice(
            np.array([0, ACTIVE, CACHED], np.uint8), num_blocks, p=[0.2, 0.5, 0.3]
        )
        self._step = 0

    def look(self) -> tuple[PoolAnswer, list[Move]]:
        rng, states = self._rng, self._states
        changed = rng.integers(0, len(states), CHANGED)
        states[changed] = rng.choice(np.array([0, ACTIVE, CACHED], np.uint8), CHANGED)
        active = np.flatnonzero(states == ACTIVE).astype(np.int32)
        self._step += 1
        tables = [
            Table(number, 0, "running", len(part) * 16, part.tobytes(), b"")
            for number, part in enumerate(np.array_split(active, REQUESTS))
        ]
        now = time.time()
        references = (states == ACTIVE).astype(np.uint8)
        moves = [
            Move(
                self._step, now, "allocate", block, -1, 1, [block, int(states[block]), int(references[block])]
            )
            for block in changed[:100].tolist()
        ]
        whole = PoolAnswer(now, 0.0, len(states), 0, 16, states.tobytes(), references.tobytes(), tables, 0)
        return whole, moves


def serve(num_blocks: int) -> tuple[uvicorn.Server, threading.Thread, str]:
    """Serve the page, and the updates of a busy pool."""

    async def updates() -> AsyncIterator[str]:
        pool = BusyPool(num_blocks)
        history = BlockHistory(pool.look()[0])
        yield msgspec.json.encode(history.full()).decode()
        while True:
            await asyncio.sleep(PERIOD)
            yield msgspec.json.encode(history.advance(*pool.look())).decode()

    async def events(request: Request) -> Response:
        return EventSourceResponse(updates())

    def route(path: str, handler):  # type: ignore[no-untyped-def]
        async def answer(request: Request) -> Response:
            response: Response = await handler(None, request)
            return response

        return Route(path, answer)

    routes = [route(path, handler) for path, handler in page_files()]
    app = Starlette(routes=[*routes, Route("/v1/blocks/events", events)])
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    return server, thread, f"http://127.0.0.1:{listener.getsockname()[1]}/blocks"


def measure(url: str, seconds: float, picture: Path | None) -> list[float]:
    """Return the milliseconds between the frames that the browser has shown."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(url)
        page.evaluate(DRAWN)
        gaps: list[float] = page.evaluate(DRIVE, seconds)
        if picture is not None:
            page.screenshot(path=picture)
        browser.close()
    return gaps


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--screenshot", type=Path, help="a PNG of the page at the end")
    parser.add_argument("--result-file", type=Path, help="write one JSON object")
    arguments = parser.parse_args()
    server, thread, url = serve(arguments.blocks)
    try:
        gaps = np.array(measure(url, arguments.seconds, arguments.screenshot))
    finally:
        server.should_exit = True
        thread.join()
    result = {
        "blocks": arguments.blocks,
        "seconds": arguments.seconds,
        "frames_per_second": round(1000 / float(gaps.mean()), 1),
        "p99_frame_ms": round(float(np.percentile(gaps, 99)), 1),
        "worst_frame_ms": round(float(gaps.max()), 1),
    }
    print(msgspec.json.encode(result).decode())
    if arguments.result_file is not None:
        write_json(arguments.result_file, f"Chromium without a GPU, {os.cpu_count()} cores", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
