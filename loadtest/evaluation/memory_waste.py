"""Fig. 2: the share of KV memory that holds token states."""

from __future__ import annotations

from quire.loadtest.client.lengths import SHAREGPT
from quire.loadtest.client.sessions import Recipe
from quire.loadtest.evaluation.figure import Figure, Table, bars
from quire.loadtest.evaluation.setting import Setting
from quire.loadtest.simulator.geometry import OPT_13B

RATE = 8.0  # requests a second: more than any of the systems keeps up with, so that memory is what is short
PAPER = {"max": 20.4, "pow2": 26.8, "oracle": 38.2, "paged": 96.3}
PARTS = {
    "tokens": "token states",
    "reserved": "reserved for later tokens",
    "internal": "internal fragmentation",
    "others": "external fragmentation and others",
}


def fig2(setting: Setting) -> Figure:
    sessions = setting.sessions(Recipe(SHAREGPT, 400), least=80)  # fewer would fit all at once
    systems = [setting.system(kind) for kind in ("max", "pow2", "oracle", "paged")]
    names = [system.name for system in systems]
    points = {system.name: setting.curve(system.name, system, sessions, RATE) for system in systems}
    outcomes = setting.run_points(points).values()
    shares = {label: [outcome.shares[part] for outcome in outcomes] for part, label in PARTS.items()}
    return Figure(
        name="fig2",
        title="Share of the KV memory that holds token states, under load",
        source="PagedAttention, Fig. 2; sections 3.1 and 6.2",
        costs=setting.costs_source(OPT_13B),
        tables=[
            Table(
                title="Per cent of the KV memory, mean over the time in which somebody waits for memory",
                header=["system", *PARTS.values(), "paper: token states"],
                rows=[
                    [system.name, *(outcome.shares[part] for part in PARTS), PAPER[system.kind]]
                    for system, outcome in zip(systems, outcomes, strict=True)
                ],
            )
        ],
        charts=[bars("KV memory under load", "per cent", names, shares, stacked=True)],
        notes=[
            f"OPT-13B, {systems[0].slots} slots (12 GB), ShareGPT-like lengths, {len(sessions)} requests at "
            f"{RATE:g} a second: overload, so that the share is that of a memory which is short.",
            "A buddy allocator's chunk is a power of two; what it rounds up counts as external "
            "fragmentation and others.",
        ],
    )
