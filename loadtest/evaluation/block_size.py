"""Fig. 18b and 19: what the block size does to latency, and to swapping against recomputing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from quire.engine.config import PreemptionMode
from quire.loadtest.client.lengths import ALPACA, SHAREGPT
from quire.loadtest.client.sessions import Recipe
from quire.loadtest.evaluation.figure import Cell, Chart, Figure, Line, Table, cell_text
from quire.loadtest.evaluation.setting import Outcome, Setting
from quire.loadtest.simulator.geometry import A100_40GB, OPT_13B
from quire.loadtest.simulator.step_costs import FEATURES, StepCosts

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Just below what Quire sustains with blocks of 16, so that memory that is wasted shows.
RATES = {"ShareGPT": (Recipe(SHAREGPT, 300), 3.6), "Alpaca": (Recipe(ALPACA, 1200), 55.0)}
PAPER_BEST = {"ShareGPT": "16–128", "Alpaca": "16–32"}  # section 7.2
PAPER_SWAP = "recompute for small blocks, swap for large ones, alike from 16 to 64"  # section 7.3
MOVED_TOKENS = 1024  # of the sequence that is swapped or recomputed in Fig. 19a
PAPER_LAYERS = 2 * OPT_13B.layers  # copies a block takes where keys and values of each layer lie apart
LAYOUTS = {"one copy a block (Quire)": 1, "one copy a layer, K and V apart (paper)": PAPER_LAYERS}
HOST_SLOTS = 8192
OVERLOAD = 5.0  # requests a second: more than Quire sustains on ShareGPT, so that requests must yield


def fig18b(setting: Setting) -> Figure:
    points = {}
    for workload, (recipe, rate) in RATES.items():
        sessions = setting.sessions(recipe)
        for size in SIZES:
            system = setting.system("paged", size)
            points[workload, size] = setting.curve(_label(workload, size), system, sessions, rate)
    outcomes = setting.run_points(points)
    latencies = {
        workload: [1e3 * outcomes[workload, size].normalized_latency for size in SIZES] for workload in RATES
    }
    columns: list[list[float]] = [[float(size) for size in SIZES]]
    for workload, each in latencies.items():
        columns += [each, [outcomes[workload, size].wasted_in_blocks for size in SIZES]]
    rows: list[list[Cell]] = [list(row) for row in zip(*columns, strict=True)]
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
                    Line(workload, [float(size) for size in SIZES], latencies[workload]) for workload in RATES
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
    costs = setting.step_costs(OPT_13B)
    recompute = 1e3 * _seconds(costs, prefill_tokens=MOVED_TOKENS, prefill_pairs=MOVED_TOKENS**2 / 2)
    sizes = [float(size) for size in SIZES]
    ways = {label: [_swap_ms(setting, size, pieces) for size in SIZES] for label, pieces in LAYOUTS.items()}
    ways["recompute"] = [recompute for _ in SIZES]
    rows: list[list[Cell]] = [list(row) for row in zip(sizes, *ways.values(), strict=True)]
    cheaper = [
        f"{cell_text(cheaper_from(sizes, ways[label], ways['recompute']))} ({label})" for label in LAYOUTS
    ]
    end_to_end, latency_lines = _end_to_end(setting)
    return Figure(
        name="fig19",
        title="Swapping against recomputing, by block size",
        source="PagedAttention, Fig. 19; section 7.3",
        costs=setting.costs_source(OPT_13B),
        tables=[
            Table(
                title=f"(a) {MOVED_TOKENS} tokens out and in again, or prefilled once more: milliseconds",
                header=["block size", *ways],
                rows=rows,
            ),
            end_to_end,
            Table(
                title="Where they meet",
                header=["", "here", "paper (section 7.3)"],
                rows=[["swapping is cheaper from blocks of", ", ".join(cheaper), PAPER_SWAP]],
            ),
        ],
        charts=[
            Chart(
                kind="lines",
                title=f"(a) {MOVED_TOKENS} tokens",
                x="block size",
                y="ms",
                lines=[Line(label, sizes, each) for label, each in ways.items()],
                log_x=True,
                top=4 * recompute,
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
    """Run ShareGPT under overload at each block size."""
    sessions = setting.sessions(Recipe(SHAREGPT, 200))
    ways: dict[str, tuple[PreemptionMode, int]] = {
        "recompute": ("recompute", 1),
        **{f"swap, {label}": ("swap", pieces) for label, pieces in LAYOUTS.items()},
    }
    sizes = tuple(size for size in SIZES if size >= 4)
    points = {}
    for way, (mode, pieces) in ways.items():
        for size in sizes:
            plain = setting.system("paged", size)
            system = dataclasses.replace(plain, preemption=mode, host_slots=HOST_SLOTS)
            label = _label(way, size)
            points[way, size] = setting.curve(label, system, sessions, OVERLOAD, pieces=pieces)
    outcomes = setting.run_points(points)
    latencies = {way: [1e3 * outcomes[way, size].normalized_latency for size in sizes] for way in ways}
    preemptions = [float(outcomes["recompute", size].preemptions) for size in sizes]
    columns = zip(map(float, sizes), *latencies.values(), preemptions, strict=True)
    rows: list[list[Cell]] = [list(row) for row in columns]
    header = ["block size", *ways, "preemptions (recompute)"]
    table = Table(title="(b) End to end under overload: ms per token", header=header, rows=rows)
    lines = [Line(way, [float(size) for size in sizes], each) for way, each in latencies.items()]
    return table, lines


def _label(name: str, block_size: int) -> str:
    return f"{name}, blocks of {block_size}"


def _swap_ms(setting: Setting, size: int, pieces: int) -> float:
    blocks = -(-MOVED_TOKENS // size)
    return 1e3 * (2 * blocks * _unit(setting.step_costs(OPT_13B, size, pieces), "swaps"))


def _unit(costs: StepCosts, feature: str) -> float:
    return costs.seconds[FEATURES.index(feature)]


def _seconds(costs: StepCosts, **amounts: float) -> float:
    return sum(amount * _unit(costs, feature) for feature, amount in amounts.items())


def cheaper_from(sizes: Sequence[float], ours: Sequence[float], other: Sequence[float]) -> Cell:
    """Return the smallest size from which on `ours` is less than `other`."""
    cheaper: Cell = "none"
    for size, one, two in reversed(list(zip(sizes, ours, other, strict=True))):
        if one >= two:
            break
        cheaper = size
    return cheaper
