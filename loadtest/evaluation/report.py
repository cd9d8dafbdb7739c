"""The evaluation as files: a page, its text for reading on a forge, and each figure's data and charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
import msgspec

from quire.loadtest.analysis.plot import Labels, Series, bar_chart, line_chart, stacked_chart
from quire.loadtest.evaluation.figure import Chart, MadeFigure, cell_text, markdown_table

TEMPLATE = Path(__file__).with_name("report.html")
DIFFERENCES = "differences.md"  # a page by hand that the folder may have
TITLE = "The PagedAttention paper's evaluation"


def write_report(folder: Path, figures: Sequence[MadeFigure], order: Sequence[str]) -> None:
    """Write the figures' files, and index.html and README.md of all figures that the folder has, in `order`.

    Raises ValueError for a file of the folder that holds no figure.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for made in figures:
        data = msgspec.json.format(msgspec.json.encode(made))
        (folder / f"{made.figure.name}.json").write_bytes(data + b"\n")
    all_made = [_read(folder / f"{name}.json") for name in order if (folder / f"{name}.json").exists()]
    text = [f"# {TITLE}\n"]
    if (folder / DIFFERENCES).exists():
        text.append(f"[Where we differ from the paper]({DIFFERENCES}), and where its values come from.\n")
    pages = []
    for made in all_made:
        figure = made.figure
        charts = [draw(chart) for chart in figure.charts]
        text.append(f"## {figure.name}: {figure.title}\n\n{figure.source}.\n")
        for number, svg in enumerate(charts, 1):
            name = f"{figure.name}-{number}.svg"
            (folder / name).write_text(svg, encoding="utf-8")
            text.append(f"![{figure.charts[number - 1].title}]({name})\n")
        text += [f"{table.title}:\n\n{markdown_table(table)}\n" for table in figure.tables]
        text += [f"- {note}" for note in figure.notes]
        text.append(f"- Times: {figure.costs}. Commit {made.commit}, {made.date}: `{made.command}`\n")
        pages.append({"made": made, "charts": charts})
    (folder / "README.md").write_text("\n".join(text), encoding="utf-8")
    template = jinja2.Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    page = template.render(title=TITLE, pages=pages, cell_text=cell_text)
    (folder / "index.html").write_text(page, encoding="utf-8")


def _read(path: Path) -> MadeFigure:
    try:
        return msgspec.json.decode(path.read_bytes(), type=MadeFigure)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} holds no figure: {error}; remove it") from error


def draw(chart: Chart) -> str:
    """Return the chart as SVG."""
    labels = Labels(chart.title, chart.x, chart.y, log_x=chart.log_x, log_y=chart.log_y, top=chart.top)
    series = [Series(line.label, line.x, line.y, line.dashed) for line in chart.lines]
    if chart.kind == "bars":
        return bar_chart(labels, chart.names, series)
    if chart.kind == "stacked":
        return stacked_chart(labels, chart.names, series)
    return line_chart(labels, series, chart.limit)
