"""Frames a second of the page /blocks in Chromium, over a pool that keeps changing.

Zooms and moves the map for some seconds, while updates come as a busy server sends them, and counts the
frames that the browser has shown.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator

import msgspec
import numpy as np
from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.inspection.messages import ACTIVE, CACHED, Move, PoolAnswer, Table
from quire.loadtest.command import command_parser
from quire.loadtest.page_frames import add_output_flags, opened, rates, report, served
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


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    add_output_flags(parser)
    arguments = parser.parse_args()

    async def updates() -> AsyncIterator[str]:
        pool = BusyPool(arguments.blocks)
        history = BlockHistory(pool.look()[0])
        yield msgspec.json.encode(history.full()).decode()
        while True:
            await asyncio.sleep(PERIOD)
            yield msgspec.json.encode(history.advance(*pool.look())).decode()

    async def events(request: Request) -> Response:
        return EventSourceResponse(updates())

    with (
        served({"/v1/blocks/events": events}) as url,
        opened(f"{url}/blocks", arguments.screenshot) as page,
    ):
        page.evaluate(DRAWN)
        gaps: list[float] = page.evaluate(DRIVE, arguments.seconds)
    report({"blocks": arguments.blocks, "seconds": arguments.seconds, **rates(gaps)}, arguments.result_file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
