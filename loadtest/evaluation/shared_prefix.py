"""Fig. 16: one prefix of examples under every request."""

from __future__ import annotations

import dataclasses

from quire.loadtest.client.lengths import LogNormal, Shape
from quire.loadtest.client.sessions import Recipe
from quire.loadtest.evaluation.figure import Cell, Figure, Table
from quire.loadtest.evaluation.request_rates import latency_chart
from quire.loadtest.evaluation.setting import Setting, ratio, sustained
from quire.loadtest.simulator.geometry import LLAMA_13B

# A sentence and its translation; the paper gives the prefixes' lengths (section 6.4), not these.
SENTENCES = Shape(LogNormal(35, 0.6, 4, 200), LogNormal(40, 0.6, 4, 200))
PREFIXES = {"1 example": (80, 1.67), "5 examples": (341, 3.58)}  # tokens; the paper's rate ÷ Orca (Oracle)'s
RATES = (4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 45, 50, 60, 70, 80, 95)


def fig16(setting: Setting) -> Figure:
    systems = {
        "Quire": dataclasses.replace(setting.system("paged"), prefix_caching=True),
        "Quire without prefix cache": setting.system("paged"),
        "Orca (Oracle)": setting.system("oracle"),
    }
    curves = {}
    for name, (length, _) in PREFIXES.items():
        sessions = setting.sessions(Recipe(SENTENCES, 1000, shared_prefix=length))
        for label, system in systems.items():
            text = f"{name}, {label}"
            curves[name, label] = setting.curve(text, system, sessions, *RATES, model=LLAMA_13B)
    outcomes = setting.run_curves(curves)
    rows: list[list[Cell]] = []
    for name, (length, paper) in PREFIXES.items():
        rates = {label: sustained(outcomes[name, label]) for label in systems}
        against = ratio(rates["Quire"], rates["Orca (Oracle)"])
        rows.append([f"{name}, {length} tokens", *rates.values(), against, paper])
    header = ["prefix", *(f"{label}, requests/s" for label in systems), "Quire ÷ Orca", "paper: ratio"]
    return Figure(
        name="fig16",
        title="A prefix that all requests share (translation, LLaMA-13B)",
        source="PagedAttention, Fig. 16; section 6.4",
        costs=setting.costs_source(LLAMA_13B),
        tables=[Table(title="Rate at the latency limit", header=header, rows=rows)],
        charts=[
            latency_chart(f"Prefix of {name}", {label: outcomes[name, label] for label in systems})
            for name in PREFIXES
        ],
        notes=[
            "The lengths of sentences and translations are ours: log-normal, with means of "
            f"{SENTENCES.prompt.mean:g} and {SENTENCES.output.mean:g} tokens.",
        ],
    )
