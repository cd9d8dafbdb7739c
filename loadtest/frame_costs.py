"""What frames cost: the milliseconds that each kind of work took in a trace of Chromium.

Work that is done within other work, as layout that a script asks for, counts as its own kind only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec

CATEGORIES = ["devtools.timeline", "blink.user_timing", "viz", "cc", "v8"]
FRAME = "ProxyMain::BeginMainFrame"  # is around all that the main thread does for a frame
BEGIN, END = "answer.begin", "answer.end"  # marks that the page sets

_KINDS = {
    "FunctionCall": "script",
    "FireAnimationFrame": "script",
    "RunMicrotasks": "script",
    "v8.callFunction": "script",
    "TimerFire": "script",
    "EventDispatch": "script",
    "ParseHTML": "script",
    "MinorGC": "garbage collection",
    "MajorGC": "garbage collection",
    "UpdateLayoutTree": "style",
    "Layout": "layout",
    "PrePaint": "paint",
    "Paint": "paint",
    "Layerize": "layers",
    "Commit": "layers",
    "RasterTask": "raster",
    "DirectRenderer::DrawFrame": "draw",
    "HitTest": "hit test",
    FRAME: "other",
}


class TraceEvent(msgspec.Struct):
    """One event of a trace (Trace Event Format), of which only what is used here is read."""

    name: str = ""
    ph: str = ""
    ts: float = 0.0  # microseconds
    dur: float = 0.0
    pid: int = 0
    tid: int = 0


class _Trace(msgspec.Struct):
    traceEvents: list[TraceEvent]


def events_of(trace: bytes) -> list[TraceEvent]:
    return msgspec.json.decode(trace, type=_Trace).traceEvents


def quarters(events: Iterable[TraceEvent]) -> list[dict[str, float]]:
    """Return of each quarter of the time between the marks the milliseconds a frame, by kind of work."""
    events = list(events)
    begin = next(event.ts for event in events if event.name == BEGIN)
    end = next(event.ts for event in events if event.name == END)
    length = (end - begin) / 4
    totals: list[dict[str, float]] = [defaultdict(float) for _ in range(4)]
    frames = [0] * 4
    for event, alone in _by_itself(events):
        quarter = int((event.ts - begin) // length)
        if not 0 <= quarter < 4:
            continue
        frames[quarter] += event.name == FRAME
        totals[quarter][_KINDS[event.name]] += alone / 1000
    return [
        {kind: round(total / max(count, 1), 2) for kind, total in sorted(kinds.items())}
        for kinds, count in zip(totals, frames, strict=True)
    ]


def _by_itself(events: Iterable[TraceEvent]) -> Iterator[tuple[TraceEvent, float]]:
    """Yield each event of a known kind, with the microseconds that none within it took."""
    threads: dict[tuple[int, int], list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event.ph == "X" and event.name in _KINDS:
            threads[event.pid, event.tid].append(event)
    for work in threads.values():
        work.sort(key=lambda event: (event.ts, -event.dur))
        alone = [event.dur for event in work]
        around: list[int] = []  # places of the events that are going on
        for at, event in enumerate(work):
            while around and work[around[-1]].ts + work[around[-1]].dur <= event.ts:
                around.pop()
            if around:
                alone[around[-1]] -= event.dur
            around.append(at)
        yield from zip(work, alone, strict=True)
