"""Fig. 18b and 19: what the block size does to latency, and to swapping against recomputing."""

from __future__ import annotations

import dataclasses

from quire.engine.config import PreemptionMode
from quire.loadtest.client.lengths import ALPACA, SHAREGPT
from quire.loadtest.client.sessions import Recipe
from quire.loadtest.evaluation.figure import Cell, Chart, Figure, Line, Table
from quire.loadtest.evaluation.setting import Outcome, Point, Setting, run_point, seeded
from quire.loadtest.simulator.geometry import A100_40GB, OPT_13B
from quire.loadtest.simulator.step_costs import FEATURES, StepCosts

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Just below what Quire sustains with blocks of 16, so that memory that is wasted shows.
RATES = {"ShareGPT": (Recipe(SHAREGPT, 300), 3.6), "Alpaca": (Recipe(ALPACA, 1200), 55.0)}
PAPER_BEST = {"ShareGPT": "16–128", "Alpaca": "16–32"}  # section 7.2
MOVED_TOKENS = 1024  # of the sequence that is swapped or recomputed in Fig. 19a
PAPER_LAYERS = 2 * OPT_13B.layers  # copies a block takes where keys and values of each layer lie apart
LAYOUTS = {"one copy a block (Quire)": 1, "one copy a layer, K and V apart (paper)": PAPER_LAYERS}
HOST_SLOTS = 8192
OVERLOAD = 5.0  # requests a second: more than Quire sustains on ShareGPT, so that requests must yield


def fig18b(setting: Setting) -> Figure:
    keys = [(workload, size) for workload in RATES for size in SIZES]
    points = []
    for workload, size in keys:
        recipe, rate = RATES[workload]
        recipe, system = seeded(recipe, setting), setting.system("paged", size)
        costs = setting.step_costs(OPT_13B, size)
        points.append(Point(_label(workload, size), system, recipe, rate, costs, setting.seed))
    outcomes = dict(zip(keys, setting.run(run_point, points), strict=True))
    rows: list[list[Cell]] = [
        [
            float(size),
            *(
                value
                for workload in RATES
                for value in (
                    1e3 * outcomes[workload, size].normalized_latency,
                    outcomes[workload, size].wasted_in_blocks,
                )
            ),
        ]
        for size in SIZES
    ]
    header = ["block size"]
    for workload in RATES:
        header += [f"{workload}, ms/token", "wasted inside blocks, %"]
    return Figure(
        name="fig18b",
        title="Latency by block size",
        source="PagedAttention, Fig. 18b; section 7.2",
        costs=setting.costs_source(OPT_13B),
        tables=[
            Table(title="Just below the knee", header=header, rows=rows),
            Table(
                title="Best block sizes",
                header=["workload", "within 10 % of the best here", "paper: best"],
                rows=[
                    [
                        workload,
                        _best({size: outcomes[workload, size] for size in SIZES}),
                        PAPER_BEST[workload],
                    ]
                    for workload in RATES
                ],
            ),
        ],
        charts=[
            Chart(
                kind="lines",
                title="Normalised latency by block size",
                x="block size",
                y="ms per token",
                lines=[
                    Line(
                        workload,
                        [float(size) for size in SIZES],
                        [1e3 * outcomes[workload, size].normalized_latency for size in SIZES],
                    )
                    for workload in RATES
                ],
                log_x=True,
            )
        ],
        notes=[
            "Costs here do not depend on the block size, so only the memory's side shows: large blocks "
            "waste. The paper's kernel was slow with blocks below 16, too, which this leaves out.",
        ],
    )


def _best(outcomes: dict[int, Outcome]) -> str:
    least = min(outcome.normalized_latency for outcome in outcomes.values())
    good = [size for size, outcome in outcomes.items() if outcome.normalized_latency <= 1.1 * least]
    return ", ".join(map(str, good))


def fig19(setting: Setting) -> Figure:
    recompute, swap_rows, lines = 0.0, [], []
    for size in SIZES:
        costs = setting.step_costs(OPT_13B, size)
        recompute = _seconds(costs, prefill_tokens=MOVED_TOKENS, prefill_pairs=MOVED_TOKENS**2 / 2)
        blocks = -(-MOVED_TOKENS // size)
        swaps = [
            2 * blocks * _unit(setting.step_costs(OPT_13B, size, pieces), "swaps")
            for pieces in LAYOUTS.values()
        ]
        swap_rows.append([float(size), *(1e3 * seconds for seconds in swaps), 1e3 * recompute])
    sizes = [float(size) for size in SIZES]
    for column, label in enumerate([*LAYOUTS, "recompute"], 1):
        lines.append(Line(label, sizes, [float(row[column]) for row in swap_rows]))
    end_to_end, latency_lines = _end_to_end(setting)
    return Figure(
        name="fig19",
        title="Swapping against recomputing, by block size",
        source="PagedAttention, Fig. 19; section 7.3",
        costs=setting.costs_source(OPT_13B),
        tables=[
            Table(
                title=f"(a) {MOVED_TOKENS} tokens out and in again, or prefilled once more: milliseconds",
                header=["block size", *LAYOUTS, "recompute"],
                rows=[list(row) for row in swap_rows],
            ),
            end_to_end,
            Table(
                title="Where they meet",
                header=["", "here", "paper (section 7.3)"],
                rows=[
                    [
                        "swapping is cheaper from blocks of",
                        ", ".join(
                            f"{_cheaper_from(swap_rows, column)} ({label})"
                            for column, label in enumerate(LAYOUTS, 1)
                        ),
                        "recompute for small blocks, swap for large ones, alike from 16 to 64",
                    ]
                ],
            ),
        ],
        charts=[
            Chart(
                kind="lines",
                title=f"(a) {MOVED_TOKENS} tokens",
                x="block size",
                y="ms",
                lines=lines,
                log_x=True,
                top=4e3 * recompute,
            ),
            Chart(
                kind="lines",
                title="(b) end to end, ShareGPT",
                x="block size",
                y="normalised latency, ms/token",
                lines=latency_lines,
                log_x=True,
            ),
        ],
        notes=[
            f"A copy over the link takes {1e6 * A100_40GB.transfer_seconds:.0f} µs to start and then runs at "
            f"{A100_40GB.link_bandwidth / 1e9:.0f} GB/s: assumptions for PCIe 4. Transfers and computing do "
            "not overlap.",
            "A block that is one region across all layers moves in one copy, so that small blocks swap well, "
            "which they did not in the paper, where each layer's keys and values moved by themselves.",
        ],
    )


def _end_to_end(setting: Setting) -> tuple[Table, list[Line]]:
    """ShareGPT under overload."""
    recipe = seeded(Recipe(SHAREGPT, 200), setting)
    ways: dict[str, tuple[PreemptionMode, int]] = {
        "recompute": ("recompute", 1),
        **{f"swap, {label}": ("swap", pieces) for label, pieces in LAYOUTS.items()},
    }
    sizes = tuple(size for size in SIZES if size >= 4)
    keys = [(way, size) for way in ways for size in sizes]
    points = []
    for way, size in keys:
        mode, pieces = ways[way]
        system = dataclasses.replace(setting.system("paged", size), preemption=mode, host_slots=HOST_SLOTS)
        costs = setting.step_costs(OPT_13B, size, pieces)
        points.append(Point(_label(way, size), system, recipe, OVERLOAD, costs, setting.seed))
    outcomes = dict(zip(keys, setting.run(run_point, points), strict=True))
    rows: list[list[Cell]] = [
        [
            float(size),
            *(1e3 * outcomes[way, size].normalized_latency for way in ways),
            float(outcomes["recompute", size].preemptions),
        ]
        for size in sizes
    ]
    header = ["block size", *ways, "preemptions (recompute)"]
    table = Table(title="(b) End to end under overload: ms per token", header=header, rows=rows)
    lines = [
        Line(
            way,
            [float(size) for size in sizes],
            [1e3 * outcomes[way, size].normalized_latency for size in sizes],
        )
        for way in ways
    ]
    return table, lines


def _label(name: str, block_size: int) -> str:
    return f"{name}, blocks of {block_size}"


def _unit(costs: StepCosts, feature: str) -> float:
    return costs.seconds[FEATURES.index(feature)]


def _seconds(costs: StepCosts, **amounts: float) -> float:
    return sum(amount * _unit(costs, feature) for feature, amount in amounts.items())


def _cheaper_from(rows: list[list[float]], column: int) -> str:
    """The smallest block size from which on column `column` costs less than the last one."""
    cheaper = ""
    for row in reversed(rows):
        if row[column] >= row[-1]:
            break
        cheaper = f"{row[0]:.0f}"
    return cheaper or "none"
