"""Tell how far off the simulator is, where a real engine did the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.loadtest.evaluation.figure import Cell, Figure, Table
from quire.loadtest.evaluation.real.case import Outcome
from quire.loadtest.evaluation.real.prediction import RealResults
from quire.loadtest.evaluation.real.rate_figures import real_figure
from quire.loadtest.simulator.step_costs import FEATURES

QUANTITIES: dict[str, Callable[[Outcome], float]] = {
    "rate sustained": lambda outcome: outcome.sustained,
    "requests at once": lambda outcome: outcome.mean_requests,
    "normalised latency": lambda outcome: outcome.normalized_latency,
    "KV memory that holds tokens, under load": lambda outcome: outcome.shares.get("tokens", 0.0),
    "blocks saved by sharing": lambda outcome: outcome.blocks_saved,
}


def accuracy(results: RealResults) -> Figure:
    """Show the simulator's costs, and how far off its predictions are."""
    rows: list[list[Cell]] = []
    for kind, with_beams in (("without beams", False), ("with beams", True)):
        runs = [run for run in results.runs if bool(run.case.beam_width) == with_beams]
        for name, value in QUANTITIES.items():
            errors = [
                100 * abs(value(run.simulated) / value(run.real) - 1) for run in runs if value(run.real)
            ]
            if errors:
                spread = [float(summary(errors)) for summary in (np.median, np.mean, np.max)]
                rows.append([f"{name}, {kind}", float(len(errors)), *spread])
    costs: list[list[Cell]] = [
        [
            name,
            *(1e6 * each.seconds[i] for each in results.costs.values()),
        ]
        for i, name in enumerate(FEATURES)
    ]
    costs.append(["mean error of a step, %", *(_percent(each.error) for each in results.costs.values())])
    costs.append(["error of the sum, %", *(_percent(each.total_error) for each in results.costs.values())])
    return real_figure(
        results,
        "accuracy",
        "How well the simulator predicts the real runs",
        [
            Table(
                title="The same requests at the same times, simulated",
                header=["quantity", "cases", "median error, %", "mean, %", "largest, %"],
                rows=rows,
            ),
            Table(
                title="Fitted costs, µs for one of each",
                header=["", *(f"blocks of {size}" for size in results.costs)],
                rows=costs,
            ),
        ],
        [],
        [
            "Costs are fitted to every other recorded step; the errors are those of the steps between. "
            "Recorded were some steps of each run, and for blocks of 16 a grid of batches and contexts.",
            "The simulator's host takes no time. That is right where it works while the device does, and "
            "wrong for beams, which the host chooses between two steps: there the simulator is too quick.",
        ],
    )


def _percent(share: float | None) -> Cell:
    return None if share is None else 100 * share
