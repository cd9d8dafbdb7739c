"""Hold what an experiment gives: a table, charts as data, and what the paper says beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

Cell = str | float | None


class Line(msgspec.Struct, frozen=True):
    """One line of a chart, or the bars of one colour."""

    label: str
    x: list[float]
    y: list[float]
    dashed: bool = False  # in the colour of the line before


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """`names` are the bars'; of lines they are empty."""

    kind: Literal["lines", "bars", "stacked"]
    title: str
    x: str
    y: str
    lines: list[Line]
    names: list[str] = []
    log_x: bool = False
    log_y: bool = False
    limit: float | None = None  # a dashed level
    top: float | None = None  # of the y axis


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers are of the run, but for columns whose header begins with `paper`."""

    title: str
    header: list[str]
    rows: list[list[Cell]]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One of the paper's figures."""

    name: str  # fig2
    title: str
    source: str  # where in the paper
    tables: list[Table]
    charts: list[Chart]
    notes: list[str]  # assumptions, and why it differs
    costs: str  # where the costs of steps come from


class MadeFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure, and where it comes from. What a .json file holds."""

    figure: Figure
    commit: str
    date: str
    command: str


def bars(
    title: str, y: str, names: Sequence[str], values: Mapping[str, Sequence[float]], *, stacked: bool = False
) -> Chart:
    """Chart bars for each of `names`, by the label of their values; stacked ones are parts of 100."""
    lines = [Line(label, [], list(each)) for label, each in values.items()]
    return Chart(
        kind="stacked" if stacked else "bars",
        title=title,
        x="",
        y=y,
        names=list(names),
        lines=lines,
        top=100 if stacked else None,
    )


def cell_text(cell: Cell) -> str:
    if cell is None:
        return "–"
    return cell if isinstance(cell, str) else f"{cell:.3g}" if abs(cell) < 100 else f"{cell:.0f}"


def markdown_table(table: Table) -> str:
    lines = [_row(table.header), _row(["---", *["---:"] * (len(table.header) - 1)])]
    lines += [_row([cell_text(cell) for cell in row]) for row in table.rows]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
