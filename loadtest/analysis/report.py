"""Results of load tests as one HTML page: tables, plots and provenance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np

from quire.loadtest.analysis.plot import Labels, Series, line_chart
from quire.loadtest.analysis.result import RunResult
from quire.loadtest.analysis.summary import MOST_LAG

TEMPLATE = Path(__file__).with_name("report.html")
MAX_POINTS = 400  # of a line: more cannot be told apart


def render(
    title: str, results: Sequence[RunResult], limit: float | None = None, knee: str | None = None
) -> str:
    """Return a page on one or more runs. `limit`: of a sweep, the seconds a token that make the `knee`."""
    template = jinja2.Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    points = rate_points(results)
    return template.render(
        title=title,
        runs=[
            {
                "result": result,
                "spreads": [(name, spread.in_ms()) for name, spread in result.summary.spreads()],
                "lag_ms": 1e3 * result.summary.lag.p99,
            }
            for result in results
        ],
        most_lag_ms=1e3 * MOST_LAG,
        plots=_plots(results, points, limit),
        knee=knee,
    )


def rate_points(results: Sequence[RunResult]) -> list[tuple[float, float]]:
    """Return (rate, mean normalised latency) of the open loops in which a request succeeded."""
    return sorted(
        (result.load.rate, result.summary.normalized_latency.mean)
        for result in results
        if result.load.rate is not None and result.summary.normalized_latency.count
    )


def _plots(results: Sequence[RunResult], points: list[tuple[float, float]], limit: float | None) -> list[str]:
    plots = []
    if len(points) > 1:
        rates, latencies = zip(*points, strict=True)
        line = Series("", rates, [1e3 * latency for latency in latencies])
        labels = Labels("Normalised latency against rate", "requests/s", "ms per token")
        plots.append(line_chart(labels, [line], None if limit is None else 1e3 * limit))
    for name, values in (
        ("Time to first token", lambda record: [record.ttft]),
        ("Time between chunks", lambda record: record.gaps),
        ("Normalised latency", lambda record: [record.normalized_latency]),
    ):
        series = []
        for result in results:
            found = [value for record in result.records if not record.failure for value in values(record)]
            if found:
                series.append(_shares(result.label, found))
        if series:
            plots.append(line_chart(Labels(name, "ms", "share of values", log_x=True, top=1), series))
    plots += [_over_time(result) for result in results[:1] if len(results) == 1]
    return plots


def _shares(label: str, values: list[float]) -> Series:
    """Return the cumulative distribution."""
    shares = np.linspace(0, 1, min(len(values), MAX_POINTS))
    return Series(label, (1e3 * np.quantile(values, shares)).tolist(), shares.tolist())


def _over_time(result: RunResult) -> str:
    """Chart output tokens a second, in up to a hundred equal slices of the run."""
    times = np.concatenate(
        [record.first + np.cumsum([0.0, *record.gaps]) for record in result.records if not record.failure]
        or [np.zeros(1)]
    )
    counts, edges = np.histogram(times, bins=min(100, max(1, len(times) // 20)))
    rates = counts / np.diff(edges)
    line = Series("", ((edges[1:] + edges[:-1]) / 2).tolist(), rates.tolist())
    return line_chart(Labels("Chunks over time", "seconds since the start", "chunks/s"), [line])
