"""Sends spans to an OpenTelemetry collector, from a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
import urllib.request
from collections.abc import Callable

import msgspec

from quire.service.tracing.otlp import FinishedSpan, export_request

log = logging.getLogger("quire.tracing")

MAX_WAITING = 2048  # requests; what is more is dropped
MAX_BATCH = 128  # requests that are sent together
BATCH_SECONDS = 1.0  # for which others are waited for
TIMEOUT = 5.0
COMPLAINT_SECONDS = 60.0  # between two of them

Made = Callable[[], list[FinishedSpan]]
"""Makes the spans of one request, in the thread that sends them."""


class SpanExporter:
    """Posts OTLP/HTTP JSON to `endpoint`/v1/traces.

    A collector that is slow or away costs spans, and no request.
    """

    def __init__(self, endpoint: str, service: str) -> None:
        self._url = endpoint.rstrip("/") + "/v1/traces"
        self._service = service
        self._waiting: queue.Queue[Made | None] = queue.Queue(MAX_WAITING)
        self._complained = float("-inf")
        self.dropped = 0  # requests whose spans found no room, or no collector
        self._thread = threading.Thread(target=self._run, name="quire-otlp", daemon=True)
        self._thread.start()

    def add(self, made: Made) -> None:
        """Have what `made` returns sent soon; it is called in another thread."""
        try:
            self._waiting.put_nowait(made)
        except queue.Full:
            self._drop(1, "the collector takes too long")

    def close(self, seconds: float = TIMEOUT) -> None:
        """Send what waits, for so long at most."""
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _run(self) -> None:
        ended = False
        while not ended:
            batch, ended = self._take()
            if batch:
                self._send(batch)

    def _take(self) -> tuple[list[Made], bool]:
        """Return what has come within a while of the first, and whether that was the last."""
        batch: list[Made] = []
        until = None
        while len(batch) < MAX_BATCH:
            try:
                left = None if until is None else max(0.0, until - time.monotonic())
                made = self._waiting.get(timeout=left)
            except queue.Empty:
                break
            if made is None:
                return batch, True
            batch.append(made)
            until = until or time.monotonic() + BATCH_SECONDS
        return batch, False

    def _send(self, batch: list[Made]) -> None:
        try:
            spans = [span for made in batch for span in made()]
            body = msgspec.json.encode(export_request(self._service, spans))
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self._url, body, headers, method="POST")
            with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                reply.read()
        except Exception as error:  # whatever is there instead of a collector
            self._drop(len(batch), f"{self._url}: {error}")

    def _drop(self, count: int, why: str) -> None:
        self.dropped += count
        if time.monotonic() - self._complained >= COMPLAINT_SECONDS:
            self._complained = time.monotonic()
            log.warning("traces of requests are lost, %d so far: %s", self.dropped, why)
