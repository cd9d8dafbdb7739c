"""Fig. 14 and 15: parallel samples and beams, and the blocks that sharing saves."""

from __future__ import annotations

import dataclasses

from quire.loadtest.client.lengths import ALPACA, SHAREGPT
from quire.loadtest.client.sessions import Recipe
from quire.loadtest.evaluation.figure import Cell, Figure, Table, bars
from quire.loadtest.evaluation.request_rates import latency_chart
from quire.loadtest.evaluation.setting import Setting, ratio, sustained
from quire.loadtest.simulator.geometry import OPT_13B
from quire.loadtest.simulator.systems import Kind
from quire.loadtest.simulator.virtual_runner import MEAN_GAP

WIDTHS = (2, 4, 6)
KINDS: tuple[Kind, ...] = ("paged", "oracle")
REQUESTS = 1200
RATES = (4, 8, 12, 16, 21, 27, 35, 45, 60, 80)
# Section 6.3: vLLM's rate over Orca (Oracle)'s on Alpaca, without samples and with beams of width 6.
PAPER_RATIOS = {"basic": 1.3, "beams of 6": 2.3}
# Fig. 15 (Alpaca) and section 6.3 (ShareGPT, from the smallest to the largest width), per cent.
PAPER_SAVED: dict[tuple[str, str, int], Cell] = {
    ("Alpaca", "samples", 2): 6.09,
    ("Alpaca", "samples", 4): 8.53,
    ("Alpaca", "samples", 6): 9.79,
    ("Alpaca", "beams", 2): 37.56,
    ("Alpaca", "beams", 4): 53.13,
    ("Alpaca", "beams", 6): 55.16,
    ("ShareGPT", "samples", 2): 16.2,
    ("ShareGPT", "samples", 6): 30.5,
    ("ShareGPT", "beams", 2): 44.3,
    ("ShareGPT", "beams", 6): 66.3,
}
_BEAMS = (
    "No model chooses these beams: each beam's candidates have log-probabilities that fall from the best "
    f"to the next by exponential gaps of {MEAN_GAP:g} nat on average, alike for all beams. How soon beams "
    "come to share their past follows from that, so what beams save depends on an assumption; what samples "
    "save does not."
)


def fig14(setting: Setting) -> Figure:
    # The wider requests are, the fewer: at the rates that are sustained a run then lasts about as long.
    recipes = {"basic": Recipe(ALPACA, REQUESTS)}
    recipes |= {f"{width} samples": Recipe(ALPACA, REQUESTS // width, n=width) for width in WIDTHS}
    recipes |= {f"beams of {width}": Recipe(ALPACA, REQUESTS // width, beam_width=width) for width in WIDTHS}
    systems = {kind: setting.system(kind) for kind in KINDS}
    curves = {}
    for name, recipe in recipes.items():
        sessions = setting.sessions(recipe)
        for kind, system in systems.items():
            curves[name, kind] = setting.curve(f"{name}, {system.name}", system, sessions, *RATES)
    outcomes = setting.run_curves(curves)
    rows: list[list[Cell]] = []
    for name in recipes:
        ours, oracle = (sustained(outcomes[name, kind]) for kind in KINDS)
        rows.append([name, ours, oracle, ratio(ours, oracle), PAPER_RATIOS.get(name)])
    header = ["", "Quire, requests/s", "Orca (Oracle), requests/s", "ratio", "paper: ratio"]
    return Figure(
        name="fig14",
        title="Parallel samples and beam search on Alpaca",
        source="PagedAttention, Fig. 14; section 6.3",
        costs=setting.costs_source(OPT_13B),
        tables=[Table(title="Rate at the latency limit", header=header, rows=rows)],
        charts=[
            latency_chart(
                f"Alpaca, {name}", {system.name: outcomes[name, kind] for kind, system in systems.items()}
            )
            for name in recipes
        ],
        notes=[_BEAMS, "Orca's beams are not charged for copying whole sequences when a beam is dropped."],
    )


def fig15(setting: Setting) -> Figure:
    workloads = {"Alpaca": (Recipe(ALPACA, 150), 6.0), "ShareGPT": (Recipe(SHAREGPT, 50), 0.5)}
    points = {}
    for name, (recipe, rate) in workloads.items():
        for how in ("samples", "beams"):
            for width in WIDTHS:
                n, beam_width = (width, 0) if how == "samples" else (1, width)
                sessions = setting.sessions(dataclasses.replace(recipe, n=n, beam_width=beam_width))
                label = f"{name}, {width} {how}"
                points[name, how, width] = setting.curve(label, setting.system("paged"), sessions, rate)
    saved = {key: outcome.blocks_saved for key, outcome in setting.run_points(points).items()}
    rows: list[list[Cell]] = [
        [name, f"{how}, {width}", each, PAPER_SAVED.get((name, how, width))]
        for (name, how, width), each in saved.items()
    ]
    return Figure(
        name="fig15",
        title="Blocks saved by sharing",
        source="PagedAttention, Fig. 15; section 6.3",
        costs=setting.costs_source(OPT_13B),
        tables=[
            Table(
                title="Per cent of the blocks that tables would need without sharing",
                header=["workload", "", "saved", "paper"],
                rows=rows,
            )
        ],
        charts=[
            bars(
                f"Alpaca: blocks saved, {how}",
                "per cent",
                [str(width) for width in WIDTHS],
                {
                    "Quire": [saved["Alpaca", how, width] for width in WIDTHS],
                    "paper": [float(str(PAPER_SAVED["Alpaca", how, width])) for width in WIDTHS],
                },
            )
            for how in ("samples", "beams")
        ],
        notes=[_BEAMS],
    )
