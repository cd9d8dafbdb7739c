"""Frames a second of the chat page in Chromium, while a long answer streams in.

The answer has headings, lists, tables, code and formulas, and comes as a server sends it, token by token.
Counts the frames that the browser has shown meanwhile, all of them and those of the last quarter, where the
answer is long. It needs playwright and a Chromium.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from quire.loadtest.command import command_parser
from quire.loadtest.frame_costs import BEGIN, CATEGORIES, END, events_of, quarters
from quire.loadtest.page_frames import (
    Handler,
    add_output_flags,
    frames_per_second,
    opened,
    rates,
    report,
    served,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

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
FOLLOW = """async ([begin, end]) => {
    const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
    while (!document.querySelector(".answer.streaming .prose > *")) await frame();
    performance.mark(begin);
    const times = [];
    while (document.querySelector(".answer.streaming")) times.push(await frame());
    performance.mark(end);
    return times.slice(1).map((time, i) => time - times[i]);
}"""


class ScriptedServer:
    """Answers as a server does whose engine gives so many tokens a second."""

    def __init__(self, characters: int, tokens_per_second: float) -> None:
        sections = "".join(SECTION.format(n=n, m=16 * n) for n in range(1, 2 + characters // len(SECTION)))
        text = sections[:characters]
        tokens = [text[at : at + TOKEN] for at in range(0, len(text), TOKEN)]
        self._events = [_chunk({"content": token}, None) for token in tokens]
        self._pause = 1 / tokens_per_second

    def handlers(self) -> dict[str, Handler]:
        return {
            "/startup": self._startup,
            "/v1/models": self._models,
            "/tokenize": self._tokenize,
            "/v1/blocks/events": self._blocks,
            "/v1/blocks/own": self._own,
            "/v1/chat/completions": self._answer,
        }

    async def _startup(self, request: Request) -> Response:
        async def phases() -> AsyncIterator[str]:
            yield _event({"phase": "ready", "done": 1, "total": 1, "unit": "model", "seconds": 0.5})

        return _stream(phases())

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
                yield _event({"active": active, "cached": 40, "free": 1960 - active, "block_size": 16})
                await asyncio.sleep(COUNTS_PERIOD)

        return _stream(counts())

    async def _answer(self, request: Request) -> Response:
        async def tokens() -> AsyncIterator[str]:
            due = time.monotonic()
            for event in self._events:
                yield event
                due += self._pause
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            yield _chunk({}, "stop")
            yield "data: [DONE]\n\n"

        return _stream(tokens())


def _chunk(delta: dict[str, str], finish_reason: str | None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return _event({"object": "chat.completion.chunk", "choices": [choice]})


def _event(data: object) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _stream(events: AsyncIterator[str]) -> Response:
    headers = {"X-Request-Id": "measured"}
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


def follow(page: Page, slowness: float = 1.0) -> list[float]:
    """Ask on the page, and return the milliseconds between its frames while the answer streams.

    All that the page's main thread does takes `slowness` times as long as it would.
    """
    page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": slowness})
    page.locator("#suggestions button").first.click()
    gaps: list[float] = page.evaluate(FOLLOW, [BEGIN, END])
    return gaps


def measured(scripted: ScriptedServer, slowness: float, arguments: Namespace) -> dict[str, object]:
    """Return the figures of one answer on a page of its own."""
    with served(scripted.handlers()) as url, opened(url, arguments.screenshot) as page:
        browser = page.context.browser
        assert browser is not None
        if arguments.trace:
            browser.start_tracing(page=page, categories=CATEGORIES)
        gaps = follow(page, slowness)
        costs = quarters(events_of(browser.stop_tracing())) if arguments.trace else None
        shown = len(page.locator(".answer .prose").inner_text())
    quarter = len(gaps) // 4
    return {
        "slowness": slowness,
        "characters_shown": shown,
        "seconds": round(sum(gaps) / 1000, 1),
        **rates(gaps),
        "frames_per_second_of_the_first_quarter": frames_per_second(gaps[:quarter]),
        "frames_per_second_of_the_last_quarter": frames_per_second(gaps[-quarter:]),
        **({"milliseconds_of_a_frame_by_quarter": costs} if costs else {}),
    }


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--characters", type=int, default=40_000, help="of the answer")
    parser.add_argument("--tokens-per-second", type=float, default=200.0)
    parser.add_argument(
        "--slowness", type=float, nargs="+", default=[1.0], help="of the page's main thread, each in turn"
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="also tell in milliseconds what the frames cost, by kind of work; takes time itself",
    )
    add_output_flags(parser)
    arguments = parser.parse_args()
    scripted = ScriptedServer(arguments.characters, arguments.tokens_per_second)
    report(
        {
            "characters": arguments.characters,
            "tokens_per_second": arguments.tokens_per_second,
            "runs": [measured(scripted, slowness, arguments) for slowness in arguments.slowness],
        },
        arguments.result_file,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
