"""Frames of a page in Chromium without a GPU: serve the page, open it, and tell how fast its frames came.

What the page asks for beside its own files is scripted, so that no engine competes with the browser for the
cores that draw. It needs playwright and a Chromium.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.loadtest.command import write_json
from quire.service.http.static import page_files

if TYPE_CHECKING:
    from playwright.sync_api import Page

Handler = Callable[[Request], Awaitable[Response]]


@contextmanager
def served(handlers: Mapping[str, Handler]) -> Iterator[str]:
    """Serve the page's files, and by these handlers, path by path, what it asks for. Yield the URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked = [Route(path, handler, methods=["GET", "POST"]) for path, handler in handlers.items()]
    app = Starlette(routes=[*_files(), *asked])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def _files() -> Iterator[Route]:
    for path, serve in page_files():

        async def answer(request: Request, serve: Callable[..., Awaitable[Response]] = serve) -> Response:
            return await serve(None, request)

        yield Route(path, answer)


@contextmanager
def opened(url: str, picture: Path | None = None) -> Iterator[Page]:
    """Open a page in a Chromium of its own. Take a picture of it at the end, if one is wanted."""
    from playwright.sync_api import sync_playwright

    browsers = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
    path = next(filter(None, map(shutil.which, browsers)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(url)
        yield page
        if picture is not None:
            page.screenshot(path=picture)
        browser.close()


def rates(gaps: list[float]) -> dict[str, float]:
    """Return the figures of frames that came with these gaps, in milliseconds."""
    return {
        "frames_per_second": frames_per_second(gaps),
        "median_frame_ms": round(float(np.median(gaps)), 1),
        "p99_frame_ms": round(float(np.percentile(gaps, 99)), 1),
        "worst_frame_ms": round(float(np.max(gaps)), 1),
    }


def frames_per_second(gaps: list[float]) -> float:
    """Return how many frames came each second, on average."""
    return round(1000 / float(np.mean(gaps)), 1)


def add_output_flags(parser: ArgumentParser) -> None:
    """Add the flags that say where a picture and the figures go."""
    parser.add_argument("--screenshot", type=Path, help="a PNG of the page at the end")
    parser.add_argument("--result-file", type=Path, help="write one JSON object")


def report(figures: Mapping[str, object], path: Path | None) -> None:
    """Print the figures, and write them with where they come from if a file is wanted."""
    print(msgspec.json.encode(figures).decode())
    write_json(path, f"Chromium without a GPU, {os.cpu_count()} cores", figures)
