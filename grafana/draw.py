"""Draws the dashboard's main panels from a real scrape: `python -m grafana.draw` writes dashboard.png.

A server of the demo model with few KV blocks, a router, their Redis and a Prometheus run for two minutes,
under little load, more than fits, and little again. The expressions are the dashboard's own. Needs
matplotlib.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path

from matplotlib import dates, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grafana.panels import ROWS, Panel
from grafana.scene import SMALL, Load, Prometheus, expression, prometheus, quire, redis

PATH = Path(__file__).with_name("dashboard.png")
PICTURED = (
    *("Device blocks", "Host blocks", "Occupancy"),
    *("Sharing", "Block turnover", "Swap"),
    *("Preemptions", "Prompt tokens by source", "Predicted against actual hits"),
    *("Time to first token", "Requests", "Step time"),
)
PHASES = ((2, 25), (12, 45), (3, 30))  # clients, and for how many seconds
COLORS = ("#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1")
TEXT, GRID, PAPER, GROUND = "#d8d9da", "#36383d", "#1f2126", "#141619"


def axis_format(unit: str) -> ticker.Formatter:
    if unit == "percentunit":
        return ticker.PercentFormatter(1, decimals=0)
    if unit in ("s", "Bps"):
        return ticker.EngFormatter({"s": "s", "Bps": "B/s"}[unit])
    suffix = unit.removeprefix("short").removeprefix("suffix:")
    return ticker.FuncFormatter(lambda value, _: f"{value:,.4g}{suffix}")


def legend(text: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels[name[1]], text)


def draw_series(axes: Axes, panel: Panel, source: Prometheus, start: float, end: float) -> None:
    times: list[float] = []
    series: dict[str, dict[float, float]] = {}
    for query in panel.queries:
        for found in source.query_range(expression(query.expr), start, end, 1):
            values = {float(at): float(value) for at, value in found["values"]}
            series[legend(query.legend, found["metric"])] = values
            times = sorted({*times, *values})
    when = [at / 86400 for at in times]  # matplotlib counts in days
    rows = [[values.get(at, float("nan")) for at in times] for values in series.values()]
    if panel.stacked:
        axes.stackplot(when, rows, labels=list(series), colors=COLORS, alpha=0.6)
    else:
        for row, name, color in zip(rows, series, COLORS, strict=False):
            axes.plot(when, row, label=name, color=color, linewidth=1.2)
    axes.set_ylim(0, panel.top)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.01, 0.99),
        ncols=4,
        fontsize=7,
        frameon=False,
        labelcolor=TEXT,
        columnspacing=1,
        handlelength=1,
        borderaxespad=0,
    )


def draw_panel(axes: Axes, panel: Panel, source: Prometheus, start: float, end: float) -> None:
    draw_series(axes, panel, source, start, end)
    axes.set_title(panel.title, fontsize=9, color=TEXT, loc="left")
    axes.set_facecolor(PAPER)
    axes.grid(color=GRID, linewidth=0.5)
    axes.tick_params(colors=TEXT, labelsize=7, length=0)
    axes.spines[:].set_visible(False)
    axes.yaxis.set_major_formatter(axis_format(panel.unit))
    axes.xaxis.set_major_locator(dates.SecondLocator(bysecond=(0, 30)))
    axes.xaxis.set_major_formatter(dates.DateFormatter("%H:%M:%S"))
    axes.margins(x=0)


def draw(source: Prometheus, start: float, end: float, path: Path) -> None:
    """`start` and `end` are Unix times; a point a second."""
    by_title = {panel.title: panel for panels in ROWS.values() for panel in panels}
    figure = Figure(figsize=(15, 11), dpi=100, facecolor=GROUND, layout="constrained")
    for axes, title in zip(figure.subplots(4, 3).flat, PICTURED, strict=True):
        draw_panel(axes, by_title[title], source, start, end)
    figure.savefig(path)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        redis() as registry,
        quire("serve", *SMALL, "--redis-url", f"redis://{registry}/0") as server,
        quire("route", "--redis-url", f"redis://{registry}/0") as router,
        prometheus(Path(folder), {"quire": [server], "quire-router": [router]}, "1s", {}) as source,
    ):
        start = time.time()
        for clients, seconds in PHASES:
            with Load(router, clients=clients):
                time.sleep(seconds)
        draw(source, start + 5, time.time(), PATH)


if __name__ == "__main__":
    main()
