"""`python -m quire.loadtest figures …`: which figures there are, and how they are made."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from quire.loadtest.evaluation.admission import admission
from quire.loadtest.evaluation.block_size import fig18b, fig19
from quire.loadtest.evaluation.chatbot import fig17
from quire.loadtest.evaluation.figure import Figure, MadeFigure, markdown_table
from quire.loadtest.evaluation.length_distributions import fig11
from quire.loadtest.evaluation.memory_layout import fig1
from quire.loadtest.evaluation.memory_waste import fig2
from quire.loadtest.evaluation.real import kernel_figures, rate_figures, sharing_figures
from quire.loadtest.evaluation.real.accuracy import accuracy
from quire.loadtest.evaluation.real.prediction import RealResults, read_real_results
from quire.loadtest.evaluation.request_rates import fig12, fig13
from quire.loadtest.evaluation.setting import Setting
from quire.loadtest.evaluation.shared_prefix import fig16
from quire.loadtest.evaluation.sharing import fig14, fig15
from quire.loadtest.provenance import Provenance
from quire.loadtest.simulator.step_costs import fit, read_records

SIMULATED: dict[str, Callable[[Setting], Figure]] = {
    figure.__name__: figure
    for figure in (fig1, fig2, fig11, fig12, fig13, fig14, fig15, fig16, fig17, fig18b, fig19, admission)
}
REAL: dict[str, Callable[[RealResults], Figure]] = {
    f"{figure.__name__}-real": figure
    for figure in (
        rate_figures.fig2,
        rate_figures.fig12,
        rate_figures.fig13,
        sharing_figures.fig14,
        sharing_figures.fig15,
        sharing_figures.fig16,
        sharing_figures.fig17,
        kernel_figures.fig18a,
        kernel_figures.fig18b,
        kernel_figures.fig19,
        kernel_figures.tutorials,
        accuracy,
    )
}
FILES = {"fig18a-real": "attention", "fig19-real": "transfers", "tutorials-real": "variants"}  # else: runs
ORDER = [
    *(name for each in (*SIMULATED, "fig18a") for name in (each, f"{each}-real")),
    "tutorials-real",
    "accuracy-real",
]
FIRST_MODEL = "opt-13b"
RESULTS = Path(__file__).parent.parent / "results" / "evaluation"


def add_figure_flags(parser: argparse.ArgumentParser) -> None:
    names = [*SIMULATED, *REAL]
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"{', '.join(names)}; all if left out")
    parser.add_argument("--scale", type=float, default=1.0, help="of the runs' lengths: 0.1 is a quick look")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--costs", type=Path, help="step records that costs are fitted to (python -m quire.loadtest record)"
    )
    parser.add_argument(
        "--real",
        type=Path,
        default=RESULTS / "real",
        help="a folder with those that quire.loadtest.evaluation.real wrote, one a model",
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="a folder for the report")
    parser.set_defaults(call=figures)


def figures(arguments: argparse.Namespace) -> int:
    """Make the figures, print their tables, write them and the report on all that the folder has.

    Raises ValueError for an unknown name, and for one that needs runs of a real engine when there are none.
    """
    names = arguments.figures or [*SIMULATED, *REAL]
    unknown = [name for name in names if name not in {*SIMULATED, *REAL}]
    if unknown:
        raise ValueError(f"there is no figure {unknown[0]}; there are {', '.join([*SIMULATED, *REAL])}")
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
    here = asdict(Provenance.here())
    made = [
        _print(MadeFigure(figure=SIMULATED[name](setting), **here)) for name in names if name in SIMULATED
    ]
    made += _real(arguments, [name for name in names if name in REAL], setting)
    from quire.loadtest.evaluation.report import write_report

    write_report(arguments.output, made, ORDER)
    print(f"\n{arguments.output / 'index.html'}")
    return 0


def _real(arguments: argparse.Namespace, names: Sequence[str], setting: Setting) -> list[MadeFigure]:
    """Make each figure of the first model that something was measured with for it."""
    made: list[MadeFigure] = []
    left = list(names)
    for folder in _models(arguments.real):
        results = read_real_results(folder, setting) if left else None
        if results is None:
            continue
        for name in list(left):
            figure = REAL[name](results)
            if figure.tables:
                where = results.where.get(FILES.get(name, "runs"), results.where["runs"])
                made.append(_print(MadeFigure(figure=figure, **where)))
                left.remove(name)
    if arguments.figures and left == list(names) != []:
        raise ValueError(
            f"{names[0]} needs runs of a real engine, and {arguments.real} has none: "
            "python -m quire.loadtest.evaluation.real makes them"
        )
    return made


def _models(folder: Path) -> list[Path]:
    """Return the folders of results, of the model that the paper had first."""
    found = sorted(path.parent for path in folder.glob("*/runs.jsonl"))
    return sorted(found, key=lambda path: path.name != FIRST_MODEL)


def _print(made: MadeFigure) -> MadeFigure:
    figure = made.figure
    print(f"\n{figure.name}: {figure.title} ({figure.source})")
    for table in figure.tables:
        print(f"\n{table.title}\n{markdown_table(table)}", flush=True)
    return made
