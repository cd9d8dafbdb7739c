"""Measure what it costs to know where the time of requests goes, against a tree without that.

`python -m quire.loadtest.why_cost BEFORE [--rounds N] [--sequences N] [--steps N] [--json FILE]`

BEFORE is a checkout of an earlier commit, such as `git worktree add ../before COMMIT` makes. scheduler_cost
runs in both trees in turn; its ratio (schedule and commit, as a multiple of a fixed piece of Python) is what
compares.
Then what the API process does for each output and each request is timed here, in microseconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from quire.engine.frames import StepFrame, encode_frame
from quire.engine.messages import StepOutputs
from quire.engine.records import Company, RequestRecord, Span
from quire.engine.sequences.timeline import Timeline
from quire.loadtest.command import command_parser, write_json
from quire.service.explain.past_requests import PastRequests
from quire.service.explain.times import RequestTimes
from quire.service.metrics.histogram import SECONDS, Histogram

HERE = Path(__file__).resolve().parents[1]
COLUMNS = ("context", "schedule", "commit", "both", "step", "ratio", "least", "p99")  # of scheduler_cost
REPEATS = 20_000

Result = TypeVar("Result")


def main() -> None:
    arguments = parse_comparison(__doc__)
    before, after = in_turn(arguments, lambda tree: scheduler_cost(tree, arguments))
    figures: dict[str, object] = {}
    print(f"{'context':>8}{'before':>9}{'after':>9}{'after / before':>16}   of {arguments.rounds} runs each")
    for context in before[0]:
        ratios = [statistics.median(run[context]["ratio"] for run in runs) for runs in (before, after)]
        print(f"{context:>8}{ratios[0]:>9.2f}{ratios[1]:>9.2f}{ratios[1] / ratios[0]:>16.3f}")
        figures[context] = {"before": ratios[0], "after": ratios[1], "step_us": before[0][context]["step"]}
    costs = {"output": output_cost(), "request": request_cost(), "record": record_cost()}
    for name, seconds in costs.items():
        print(f"{name:>8}{1e6 * seconds:>9.2f} µs")
        figures[f"{name}_us"] = round(1e6 * seconds, 3)
    write_json(arguments.json, "cpu", figures)


def parse_comparison(text: str | None) -> argparse.Namespace:
    """Return the flags of a command that compares this tree with an earlier one."""
    parser = command_parser(text)
    parser.add_argument("before", type=Path, metavar="BEFORE", help="a checkout of an earlier commit")
    parser.add_argument("--rounds", type=int, default=3, help="of both trees in turn")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args()


def in_turn(
    arguments: argparse.Namespace, run: Callable[[Path], Result]
) -> tuple[list[Result], list[Result]]:
    """Run something in both trees, each of them first in every other round; return what each one gave."""
    before: list[Result] = []
    after: list[Result] = []
    trees = ((arguments.before.resolve(), before), (HERE, after))
    for at in range(arguments.rounds):
        for tree, results in trees if at % 2 == 0 else reversed(trees):
            results.append(run(tree))
    return before, after


def scheduler_cost(tree: Path, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Run scheduler_cost in `tree`; return its columns, by its first one."""
    flags = ("--sequences", str(arguments.sequences), "--steps", str(arguments.steps))
    return read_columns(python_in(tree, "-m", "quire.loadtest.scheduler_cost", *flags))


def python_in(tree: Path, *words: str) -> str:
    """Run a Python of its own with `tree` as what it imports; return what that prints."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def read_columns(text: str) -> dict[str, dict[str, float]]:
    """Return what scheduler_cost prints, by the first column."""
    rows = [line.split() for line in text.splitlines()]
    return {
        row[0]: dict(zip(COLUMNS[1:], map(float, row[1:]), strict=True))
        for row in rows
        if len(row) == len(COLUMNS) and row != list(COLUMNS)
    }


def timed(function: Callable[[], object]) -> float:
    """Return the processor seconds of a call."""
    begin = time.thread_time()
    for _ in range(REPEATS):
        function()
    return (time.thread_time() - begin) / REPEATS


def output_cost() -> float:
    """Return what is added for each output of a request, which holds a token or more: seconds."""
    times, histogram = RequestTimes("", "a", 0.0, 0.0), Histogram(SECONDS)

    def after() -> None:
        times.text_seconds += time.monotonic()
        histogram.observe(0.01, 1, "a")

    return timed(after) - timed(lambda: histogram.observe(0.01))


def request_cost() -> float:
    """Return what is added for each request in the API process."""
    past, record = PastRequests(), _record()

    def remember() -> None:
        times = RequestTimes("tenant", "a", 0.0, 0.0, engine_requests=[0])
        past.add(times)
        past.record(record)
        past.end(times, "finished")

    return timed(remember)


def record_cost() -> float:
    """Return what is added for each request in the engine's process: its timeline, sent."""
    steps = Company()

    def live() -> None:
        timeline = Timeline(0.0)
        timeline.admit(1.0, [])
        timeline.chunk(2.0, 512)
        timeline.decode(3.0, steps)
        record = timeline.end(0, 4.0, "length", steps, (512, 0, 0))
        encode_frame(StepFrame(StepOutputs(), None, [record]))  # type: ignore[arg-type]

    return timed(live)


def _record() -> RequestRecord:
    spans = [Span(name, 0.0, 1.0) for name in ("queue", "prefill", "decode")]
    return RequestRecord(0, 0.0, 3.0, "length", spans, 0, [], 512, 0, 0, None, [], 0, Company())


if __name__ == "__main__":
    main()
