"""`quire top`: a server's memory in a terminal, by its stream of blocks and its metrics."""

from __future__ import annotations

import json
import select
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec
from rich.console import Console
from rich.live import Live

from quire.service.commands.top_view import TopView
from quire.service.inspector.updates import BlockUpdate

TIMEOUT = 30.0  # twice as long as a stream is silent
RETRY_SECONDS = 1.0
METRICS_SECONDS = 1.0
FRAME_SECONDS = 0.25

_updates = msgspec.json.Decoder(BlockUpdate)


class Unusable(ValueError):
    """The server refuses for good: another try would be refused, too."""


def top(url: str, key: str | None) -> int:
    """Show the server at `url` until q is pressed; where the output is no terminal, once.

    Raises ValueError if the server refuses.
    """
    watcher = Watcher(url.rstrip("/"), key)
    console = Console()
    if not console.is_terminal:
        watcher.look_once()
        console.print(watcher.view.draw(height=1 << 16))
        return 0
    watcher.start()
    with _unbuffered_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while not _pressed("q", FRAME_SECONDS):
            watcher.check()
            with watcher.lock:
                live.update(watcher.view.draw(console.height), refresh=True)
    return 0


class Watcher:
    """Follows a server from two threads of its own, which end with the process."""

    def __init__(self, url: str, key: str | None) -> None:
        self.view = TopView(url)
        self.lock = threading.Lock()  # of the view
        self._url = url
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._refusal: Unusable | None = None

    def start(self) -> None:
        for follow in (self._follow_blocks, self._follow_metrics):
            threading.Thread(target=follow, daemon=True).start()

    def check(self) -> None:
        """Raises Unusable once the server has refused."""
        if self._refusal is not None:
            raise self._refusal

    def look_once(self) -> None:
        """Take the first update and the metrics. Raises ValueError."""
        try:
            self.view.take(next(self._blocks()))
            self.view.take_metrics(self._get("/metrics"))
        except (OSError, HTTPException) as error:
            raise ValueError(f"{self._url} cannot be reached: {error}") from None

    def _follow_blocks(self) -> None:
        wait = threading.Event()
        while self._refusal is None:
            try:
                for update in self._blocks():
                    with self.lock:
                        self.view.take(update)
                self._lose("the stream ended; trying again")
            except Unusable as refusal:
                self._refusal = refusal
            except (OSError, HTTPException, ValueError) as error:
                self._lose(f"{error}; trying again")
            wait.wait(RETRY_SECONDS)

    def _follow_metrics(self) -> None:
        wait = threading.Event()
        while self._refusal is None:
            try:
                text = self._get("/metrics")
                with self.lock:
                    self.view.take_metrics(text)
            except (OSError, HTTPException, ValueError):
                pass  # the stream tells of it
            wait.wait(METRICS_SECONDS)

    def _lose(self, problem: str) -> None:
        with self.lock:
            self.view.problem = problem

    def _open(self, path: str) -> HTTPResponse:
        try:
            response: HTTPResponse = urlopen(
                Request(self._url + path, headers=self._headers), timeout=TIMEOUT
            )
            return response
        except HTTPError as error:
            message = _message(error)
            if error.code in (401, 403, 404):
                raise Unusable(f"{self._url}{path} answers {error.code}: {message}") from None
            raise ValueError(f"{self._url} answers {error.code}: {message}") from None

    def _get(self, path: str) -> str:
        with self._open(path) as response:
            text: str = response.read().decode()
            return text

    def _blocks(self) -> Iterator[BlockUpdate]:
        with self._open("/v1/blocks/events") as response:
            for line in response:
                if line.startswith(b"data: "):
                    data = line.removeprefix(b"data: ")
                    if data.startswith(b'{"error"'):
                        raise ValueError(json.loads(data)["error"]["message"])
                    yield _updates.decode(data)


def _message(error: HTTPError) -> str:
    try:
        message: str = json.loads(error.read())["error"]["message"]
        return message
    except (ValueError, KeyError, TypeError):
        return error.reason


@contextmanager
def _unbuffered_keys() -> Iterator[None]:
    """Have keys come without Enter; where the input is no terminal, none come."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed(key: str, seconds: float) -> bool:
    """Return whether `key` is pressed within so many seconds."""
    if not sys.stdin.isatty():
        threading.Event().wait(seconds)
        return False
    ready = select.select([sys.stdin], [], [], seconds)[0]
    return bool(ready) and sys.stdin.read(1) == key
