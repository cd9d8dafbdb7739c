"""The time of a request in spans that follow one another, from its headers to its last byte."""

from __future__ import annotations

from dataclasses import dataclass

from quire.service.explain.times import RequestTimes


@dataclass(frozen=True)
class Stretch:
    """Seconds since the request began, and how many; of `pieces` the sum, and where the first began."""

    name: str
    start: float
    seconds: float
    tokens: int = 0  # that a prefill chunk computed
    steps: int = 0  # of a decode
    pieces: int = 1


def server_timing(times: RequestTimes) -> str:
    """Return where the time went as a Server-Timing header says it, with its total."""
    total, parts = stretches(times, times.began)
    sums: dict[str, float] = {}
    for part in parts:
        sums[part.name] = sums.get(part.name, 0.0) + part.seconds
    return ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in (*sums.items(), ("total", total)))


class _Line:
    """Stretches that are put one after the other, none of them behind `limit`."""

    def __init__(self, began: float, limit: float) -> None:
        self.stretches: list[Stretch] = []
        self._began = began
        self.limit = limit
        self._at = began

    def until(self, name: str, end: float) -> None:
        """Go on to `end`, if that is not past."""
        self.take(name, self._at, end - self._at)

    def take(
        self, name: str, start: float, seconds: float, *, tokens: int = 0, steps: int = 0, pieces: int = 1
    ) -> None:
        """Go on for `seconds`, as far as the limit allows."""
        seconds = min(seconds, self.limit - self._at)
        if seconds > 0 or (tokens and seconds == 0):
            self.stretches.append(
                Stretch(name, max(0.0, start - self._began), seconds, tokens, steps, pieces)
            )
            self._at += seconds


def stretches(times: RequestTimes, now: float) -> tuple[float, list[Stretch]]:
    """Return the seconds since it began, until it ended or `now`, and what they went into."""
    end = now if times.ended is None else times.ended
    line = _Line(times.began, end)
    line.until("receiving", times.received)
    finished = end if times.finished is None else times.finished
    record = times.decisive
    queued = end if times.queued is None else times.queued
    line.until("tokenising", queued if record is None else max(queued, record.arrival))
    if times.queued is not None and record is not None:
        line = _within_engine(line, times, finished)
    line.until("engine" if record is None else "delivery", finished)
    if times.text_ready is not None:
        line.until("detokenising", times.text_ready)
    if times.unread_since is not None:
        line.until("sending", times.unread_since)
        line.until("client_not_reading", end)
    line.until("sending", end)
    return end - times.began, line.stretches


def _within_engine(line: _Line, times: RequestTimes, finished: float) -> _Line:
    """Put what the engine told; it may have gone on behind a stop string, which only the service sees."""
    record = times.decisive
    assert record is not None
    line.limit, limit = min(line.limit, finished), line.limit
    decodes = [span for span in record.spans if span.name == "decode"]
    for span in record.spans:
        steps = record.company.steps if decodes and span is decodes[0] and len(decodes) == 1 else 0
        line.take(span.name, span.start, span.seconds, tokens=span.count, steps=steps, pieces=span.pieces)
    line.limit = limit
    return line
