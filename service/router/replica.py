"""One replica as the router knows it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal
from urllib.parse import urlsplit

import yarl
from starlette.types import Scope

from engine.registry import Load
from service.router.recent import RecentPrefixes

log = logging.getLogger("quire.router")


class Replica:
    """`up`: it answered that it is ready when it was asked last, and nothing has failed since."""

    def __init__(self, url: str, *, up: bool) -> None:
        self.url = url
        self.name = urlsplit(url).netloc
        self.up = up
        self.draining = False
        self.fingerprint: str | None = None  # of the deployment that it is registered in
        self.registered_at = float("-inf")
        self.in_flight = 0  # requests that this router has with it
        self.recent = RecentPrefixes()
        self._reported = Load()
        self._report: str | None = None
        self._in_flight_then = 0

    def address(self, scope: Scope) -> yarl.URL:
        """Of the same path and query there, as they came."""
        path, query = scope["raw_path"].decode(), scope["query_string"].decode()
        return yarl.URL(f"{self.url}{path}?{query}" if query else self.url + path, encoded=True)

    @property
    def usable(self) -> bool:
        return self.up and not self.draining

    @property
    def condition(self) -> Literal["ready", "draining", "down"]:
        return "draining" if self.draining else "ready" if self.up else "down"

    @property
    def load(self) -> int:
        """Sequences that run or wait: what it said last, and what we have sent and got back since."""
        said = self._reported.running + self._reported.waiting
        return max(self.in_flight, said + self.in_flight - self._in_flight_then)

    def report(self, load: Load, report: str, now: float) -> None:
        """What the registry says of it; `report` differs from one publication to the next."""
        self.registered_at = now
        self.draining = load.draining
        if report != self._report:
            self._report, self._reported, self._in_flight_then = report, load, self.in_flight

    def lost(self, reason: BaseException | str) -> None:
        """It did not do what it was asked: nothing is sent there until it says that it is ready."""
        if self.up:
            log.warning("replica %s fails: %s", self.name, reason or type(reason).__name__)
        self.up = False

    @contextmanager
    def request(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
