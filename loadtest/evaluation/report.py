"""The evaluation as files: a page, its text for reading on a forge, and each figure's data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import jinja2
import msgspec

from loadtest.evaluation.figure import Chart, Figure, cell_text, markdown_table
from loadtest.plot import Labels, Series, bar_chart, line_chart, stacked_chart
from loadtest.provenance import Provenance

TEMPLATE = Path(__file__).with_name("report.html")


def write_report(folder: Path, figures: Sequence[Figure], costs: str) -> None:
    """Write index.html, README.md, and of each figure a .json and .svg files.

    `costs` says where the costs of steps come from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    provenance = Provenance.here()
    text = [
        "# The PagedAttention paper's evaluation, by simulation\n",
        f"Commit {provenance.commit}, {provenance.date}: `{provenance.command}`. Step costs: {costs}.\n",
    ]
    pages = []
    for figure in figures:
        (folder / f"{figure.name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(figure)) + b"\n")
        charts = [draw(chart) for chart in figure.charts]
        text.append(f"## {figure.name}: {figure.title}\n\n{figure.source}.\n")
        for number, svg in enumerate(charts, 1):
            name = f"{figure.name}-{number}.svg"
            (folder / name).write_text(svg, encoding="utf-8")
            text.append(f"![{figure.charts[number - 1].title}]({name})\n")
        text += [f"{table.title}:\n\n{markdown_table(table)}\n" for table in figure.tables]
        text += [f"- {note}" for note in figure.notes] + [""]
        pages.append({"figure": figure, "charts": charts})
    (folder / "README.md").write_text("\n".join(text), encoding="utf-8")
    template = jinja2.Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    page = template.render(pages=pages, cell_text=cell_text, costs=costs, **asdict(provenance))
    (folder / "index.html").write_text(page, encoding="utf-8")


def draw(chart: Chart) -> str:
    """The chart as SVG."""
    labels = Labels(chart.title, chart.x, chart.y, log_x=chart.log_x, top=chart.top)
    series = [Series(line.label, line.x, line.y) for line in chart.lines]
    if chart.kind == "bars":
        return bar_chart(labels, chart.names, series)
    if chart.kind == "stacked":
        return stacked_chart(labels, chart.names, series)
    return line_chart(labels, series, chart.limit)
