"""One replica as the router knows it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal
from urllib.parse import urlsplit

import yarl
from starlette.types import Scope

from quire.engine.hashing import Digest
from quire.engine.registry.redis import Load
from quire.service.router.failures import Failures, Outcome
from quire.service.router.sent_prefixes import SentPrefixes

log = logging.getLogger("quire.router")

SILENT_PROBES = 5  # in a row without any answer: half a minute of a process that stands still


class Replica:
    """`up`: it answered that it is ready when it was asked last, and nothing has failed since."""

    def __init__(self, url: str, *, up: bool) -> None:
        self.url = url
        self.name = urlsplit(url).netloc
        self.up = up
        self.has_been_ready: bool | None = None  # None: it has not been asked yet
        self.draining = False  # says the registry, which may lie: who does drain is not ready either
        self.leaving = False  # it is not behind the name any more, and has what it was sent before
        self.fingerprint: str | None = None  # of the deployment that it is registered in
        self.registered_at = float("-inf")
        self.in_flight = 0  # requests that this router has with it
        self.sent_prefixes = SentPrefixes()
        self.failures = Failures()
        self._reported = Load()
        self._report: tuple[str, int] | None = None  # epoch and number
        self._in_flight_then = 0
        self._unanswered = 0  # probes in a row
        self._given_up: dict[object, Callable[[], None]] = {}  # how each request hears that it is in vain

    def address(self, scope: Scope) -> yarl.URL:
        """Return the address of the same path and query there, as they came."""
        path, query = scope["raw_path"].decode(), scope["query_string"].decode()
        return yarl.URL(f"{self.url}{path}?{query}" if query else self.url + path, encoded=True)

    @property
    def usable(self) -> bool:
        return self.up and not self.draining and not self.leaving

    @property
    def condition(self) -> Literal["ready", "draining", "down"]:
        return "draining" if self.draining or self.leaving else "ready" if self.up else "down"

    @property
    def load(self) -> int:
        """Return how many sequences run or wait: what it said last, and what we have sent and got back since.

        Failures count as some, too.
        """
        said = self._reported.running + self._reported.waiting
        running = max(self.in_flight, said + self.in_flight - self._in_flight_then)
        return running + self.failures.load(time.monotonic())

    def fill(self, now: float, more_blocks: int = 0) -> float:
        """Return what this router has sent it lately, and so much more, ÷ the blocks that it has; else 1."""
        blocks = self._reported.blocks
        return (self.sent_prefixes.size(now) + more_blocks) / blocks if blocks else 1.0

    def report(self, load: Load, epoch: str, seq: int, now: float) -> None:
        """Take in what the registry says of it; `seq` differs between the publications of an epoch."""
        self.registered_at = now
        before = self._report
        if before == (epoch, seq):  # it may have answered since that it is ready
            return
        if before is not None and before[0] != epoch:  # another process, whose cache began empty
            self.sent_prefixes = SentPrefixes()
        self.draining = load.draining
        self._report, self._reported, self._in_flight_then = (epoch, seq), load, self.in_flight

    def fared(self, outcome: Outcome, sent_at: float) -> None:
        """Note how a request fared that it was sent then."""
        if outcome == "answered":
            self.failures.clear()
        elif outcome == "failed":
            self.failures.add(sent_at, time.monotonic())

    def failed(self, sent_at: float, reason: BaseException | str) -> None:
        """Note that what it was sent then failed there."""
        self.fared("failed", sent_at)
        self.lost(reason)

    def lost(self, reason: BaseException | str) -> None:
        """Note that it did not do what it was asked: it gets nothing until it says that it is ready."""
        if self.up:
            log.warning("replica %s fails: %s", self.name, str(reason) or type(reason).__name__)
        self.up = False

    def note_probe(self, *, answered: bool) -> None:
        """Note whether a probe was answered; after SILENT_PROBES that were not, give up what waits there.

        A process that stands still keeps its connections.
        """
        self._unanswered = 0 if answered else self._unanswered + 1
        if self._unanswered >= SILENT_PROBES and self._given_up:
            log.warning("replica %s is silent: %d requests there end", self.name, len(self._given_up))
            for give_up in list(self._given_up.values()):
                give_up()

    @contextmanager
    def request(
        self, digests: Sequence[Digest] = (), give_up: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Note a request that it works on; `digests`: of its prompt.

        `give_up` is called once it is in vain to wait.
        """
        key = object()
        self.in_flight += 1
        self._given_up[key] = give_up
        try:
            yield
        finally:
            del self._given_up[key]
            self.in_flight -= 1
            self.sent_prefixes.answered(digests, time.monotonic())
