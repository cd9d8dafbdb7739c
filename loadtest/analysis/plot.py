"""Charts as SVG text, for reports that are one file each."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
except ImportError as error:
    raise SystemExit(f"plots need matplotlib: pip install 'quire[loadtest]' ({error})") from error

STYLE: Any = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "quire",  # the same chart gives the same file
}


MOST_TICKS = 12  # a logarithmic axis of no more points has a tick at each


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one group of bars."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False  # in the colour of the line before


@dataclass(frozen=True, slots=True)
class Labels:
    """Texts of a chart, and whether an axis is logarithmic."""

    title: str
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    top: float | None = None  # of the y axis


def line_chart(labels: Labels, series: Sequence[Series], limit: float | None = None) -> str:
    """Draw lines with a marker at each point, and a dashed level at `limit`; return the SVG."""
    with _chart(labels) as (axes, svg):
        for line in series:
            marker = "o" if len(line.x) <= 40 else ""
            style = {"linestyle": "--", "color": axes.lines[-1].get_color()} if line.dashed else {}
            axes.plot(line.x, line.y, marker=marker, markersize=3, linewidth=1.2, label=line.label, **style)
        points = series[0].x
        if labels.log_x and len(points) <= MOST_TICKS:
            axes.set_xscale("log")
            axes.set_xticks(points, [f"{x:g}" for x in points])
            axes.minorticks_off()
        if limit is not None:
            axes.axhline(limit, linestyle="--", linewidth=0.8, color="gray")
        if len(series) > 1:
            axes.legend(frameon=False, fontsize=8)
    return svg[0]


def bar_chart(labels: Labels, names: Sequence[str], groups: Sequence[Series]) -> str:
    """Draw a bar for each name, side by side for each group (whose `x` is not used); return the SVG."""
    width = 0.8 / len(groups)
    with _chart(labels) as (axes, svg):
        for i, group in enumerate(groups):
            at = [name + (i - (len(groups) - 1) / 2) * width for name in range(len(names))]
            bars = axes.bar(at, group.y, width, label=group.label)
            axes.bar_label(bars, fmt="%.3g", fontsize=7)
        axes.set_xticks(range(len(names)), names)
        if len(groups) > 1:
            axes.legend(frameon=False, fontsize=8)
    return svg[0]


def stacked_chart(labels: Labels, names: Sequence[str], parts: Sequence[Series]) -> str:
    """Draw a bar for each name, cut into parts from below; return the SVG."""
    with _chart(labels) as (axes, svg):
        base = [0.0] * len(names)
        for part in parts:
            bars = axes.bar(range(len(names)), part.y, 0.6, bottom=base, label=part.label)
            axes.bar_label(
                bars, labels=[f"{y:.1f}" if y >= 3 else "" for y in part.y], label_type="center", fontsize=7
            )
            base = [low + y for low, y in zip(base, part.y, strict=True)]
        axes.set_xticks(range(len(names)), names)
        axes.figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    return svg[0]


@contextmanager
def _chart(labels: Labels) -> Iterator[tuple[Any, list[str]]]:
    """Yield axes to draw on, and a list that has the SVG afterwards."""
    svg: list[str] = []
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6, 3.4), layout="constrained")
        axes = figure.subplots()
        yield axes, svg
        axes.set(title=labels.title, xlabel=labels.x, ylabel=labels.y)
        if labels.log_x and axes.get_xscale() != "log":
            axes.set_xscale("log")
        if labels.log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0, top=labels.top)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    svg.append(text[text.index("<svg") :])
