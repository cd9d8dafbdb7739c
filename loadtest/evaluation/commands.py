"""`python -m loadtest figures …`: which figures there are, and how they are made."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from loadtest.evaluation.block_size import fig18b, fig19
from loadtest.evaluation.chatbot import fig17
from loadtest.evaluation.figure import Figure, markdown_table
from loadtest.evaluation.memory_waste import fig2
from loadtest.evaluation.request_rates import fig12, fig13
from loadtest.evaluation.setting import Setting
from loadtest.evaluation.shared_prefix import fig16
from loadtest.evaluation.sharing import fig14, fig15
from loadtest.simulator.step_costs import fit, read_records

FIGURES: dict[str, Callable[[Setting], Figure]] = {
    figure.__name__: figure for figure in (fig2, fig12, fig13, fig14, fig15, fig16, fig17, fig18b, fig19)
}
RESULTS = Path(__file__).parent.parent / "results" / "evaluation"


def add_figure_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"{', '.join(FIGURES)}; all if left out")
    parser.add_argument("--scale", type=float, default=1.0, help="of the runs' lengths: 0.1 is a quick look")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--costs", type=Path, help="step records that costs are fitted to (python -m loadtest record)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="a folder for the report")
    parser.set_defaults(call=figures)


def figures(arguments: argparse.Namespace) -> int:
    """Make the figures, print their tables, write them and the report on all that the folder has.

    Raises ValueError for an unknown name.
    """
    names = arguments.figures or list(FIGURES)
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise ValueError(f"there is no figure {unknown[0]}; there are {', '.join(FIGURES)}")
    costs = (
        fit(read_records(arguments.costs), f"fitted to half of {arguments.costs}")
        if arguments.costs
        else None
    )
    setting = Setting(
        scale=arguments.scale,
        seed=arguments.seed,
        processes=arguments.processes,
        costs=costs,
        on_done=lambda text: print(f"  {text}", file=sys.stderr, flush=True),
    )
    made = []
    for name in names:
        figure = FIGURES[name](setting)
        made.append(figure)
        print(f"\n{figure.name}: {figure.title} ({figure.source})")
        for table in figure.tables:
            print(f"\n{table.title}\n{markdown_table(table)}", flush=True)
    from loadtest.evaluation.report import write_report

    write_report(arguments.output, made, list(FIGURES))
    print(f"\n{arguments.output / 'index.html'}")
    return 0
