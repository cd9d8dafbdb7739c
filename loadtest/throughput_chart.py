"""Draw docs/throughput.svg from docs/benchmarks.md: `python -m quire.loadtest.throughput_chart`."""

from __future__ import annotations

import io
import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from quire.loadtest.analysis.plot import STYLE

DOCS = Path(__file__).resolve().parents[1] / "docs"
MODELS = {"0.6B": "Qwen3-0.6B", "8B": "Llama-3.1-8B"}
WORKLOADS = ("single", "decode256", "mixed", "sharegpt", "alpaca")
COLUMNS = {"vLLM": "0.6", "like for like": "C0", "defaults": "C1"}
LABELS = {
    "vLLM": "vLLM 0.24.0",
    "like for like": "Quire, bf16 cache, in order",
    "defaults": "Quire, defaults",
}


def read_table(text: str) -> dict[str, dict[str, float]]:
    """Return {workload: {column: the cell's first number}} of the first table; empty cells are left out."""
    head, _, *rows = (line for line in text.splitlines() if line.startswith("|"))
    names = [name.strip() for name in head.strip("|").split("|")][1:]
    table: dict[str, dict[str, float]] = {}
    for row in rows:
        workload, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        if len(cells) != len(names):
            break  # the next table
        numbers = (re.match(r"[\d,]+", cell) for cell in cells)
        found = {name: number for name, number in zip(names, numbers, strict=True) if number}
        table[workload.split(" (")[0]] = {name: float(n[0].replace(",", "")) for name, n in found.items()}
    return table


def draw(table: dict[str, dict[str, float]]) -> str:
    """Return the chart as SVG: a panel for each model, a bar for each engine and workload."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        for axes, (short, model) in zip(
            figure.subplots(1, 2, width_ratios=(5, 4)), MODELS.items(), strict=True
        ):
            shown = [name for name in WORKLOADS if f"{short}: vLLM" in table[name]]
            for i, (column, color) in enumerate(COLUMNS.items()):
                heights = [table[name][f"{short}: {column}"] for name in shown]
                at = [place + (i - 1) * 0.28 for place in range(len(shown))]
                bars = axes.bar(at, heights, 0.26, label=LABELS[column], color=color)
                axes.bar_label(bars, fmt="{:,.0f}", fontsize=6)
            axes.set(title=f"{model}, output tokens per second")
            axes.set_xticks(range(len(shown)), shown)
            axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


if __name__ == "__main__":
    svg = draw(read_table((DOCS / "benchmarks.md").read_text(encoding="utf-8")))
    (DOCS / "throughput.svg").write_text(svg, encoding="utf-8")
