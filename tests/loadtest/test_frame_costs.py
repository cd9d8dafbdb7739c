"""What frames cost, from the events of a trace."""

import json

from quire.loadtest.frame_costs import BEGIN, END, FRAME, events_of, quarters


def work(name: str, start: float, milliseconds: float, thread: int = 1) -> dict[str, object]:
    return {
        "name": name,
        "ph": "X",
        "ts": 1000 * start,
        "dur": 1000 * milliseconds,
        "pid": 1,
        "tid": thread,
        "args": {},
    }


def mark(name: str, at: float) -> dict[str, object]:
    return {"name": name, "ph": "R", "ts": 1000 * at, "pid": 1, "tid": 1}


def test_work_within_other_work_counts_as_its_own_kind() -> None:
    """In the second of four frames a script takes 6 ms, 4 of them for layout, while tiles are drawn."""
    trace = [
        mark(BEGIN, 100),
        *(work(FRAME, 100 + 10 * frame, 9) for frame in range(4)),
        *(work("FireAnimationFrame", 100 + 10 * frame, 1) for frame in (0, 2, 3)),
        work("FireAnimationFrame", 110, 6),
        work("Layout", 111, 4),
        work("UpdateLayoutTree", 112, 1),
        work("RasterTask", 111, 5, thread=2),
        work("Layout", 99, 0.5),  # before the answer came
        work("Unheard-of", 111, 0.5),
        mark(END, 140),
    ]
    costs = quarters(events_of(json.dumps({"traceEvents": trace, "metadata": {}}).encode()))
    assert costs == [
        {"other": 8.0, "script": 1.0},
        {"other": 3.0, "script": 2.0, "layout": 3.0, "style": 1.0, "raster": 5.0},
        {"other": 8.0, "script": 1.0},
        {"other": 8.0, "script": 1.0},
    ]
