"""Fig. 14 to 17 from runs on a real engine, the paper's values and the simulator's beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.loadtest.evaluation.chatbot import PAPER_RATIO as PAPER_CHATBOT_RATIO
from quire.loadtest.evaluation.figure import Cell, Chart, Figure, Table, bars
from quire.loadtest.evaluation.real.prediction import Compared, RealResults, alike, durations
from quire.loadtest.evaluation.real.rate_figures import KINDS, OVERLOAD, PLAIN, real_figure
from quire.loadtest.evaluation.setting import ratio
from quire.loadtest.evaluation.shared_prefix import PREFIXES
from quire.loadtest.evaluation.sharing import PAPER_RATIOS, PAPER_SAVED, WIDTHS
from quire.loadtest.simulator.systems import NAMES, Kind

WORKLOADS = ("Alpaca", "ShareGPT")
RATIO_HEADER = [
    "",
    "beside",
    "Quire, requests/s",
    "the other",
    "ratio",
    "simulated: Quire",
    "the other",
    "ratio",
    "paper: ratio",
]
Paper = Mapping[Kind, float]


def fig14(results: RealResults) -> Figure:
    plain = {**PLAIN, "workload": "Alpaca", "share": None}
    wanted: dict[str, Mapping[str, object]] = {"basic": plain}
    wanted |= {f"{width} samples": {**plain, "n": width} for width in WIDTHS}
    wanted |= {f"beams of {width}": {**plain, "beam_width": width} for width in WIDTHS}
    rows, notes = _against(
        results,
        {
            name: (fields, {"oracle": PAPER_RATIOS[name]} if name in PAPER_RATIOS else {})
            for name, fields in wanted.items()
        },
    )
    table = Table(title="Alpaca: sustained under overload", header=RATIO_HEADER, rows=rows)
    title = "Parallel samples and beam search, on a real engine"
    return real_figure(results, "fig14", title, [table], _ratio_chart("Alpaca", rows), notes)


def fig15(results: RealResults) -> Figure:
    rows: list[list[Cell]] = []
    shown: list[Compared] = []
    for workload in WORKLOADS:
        for how, field in (("samples", "n"), ("beams", "beam_width")):
            for width in WIDTHS:
                fields = {**PLAIN, "workload": workload, "kind": "paged", field: width}
                for run in alike({width: results.find(**fields)}).values():
                    shown.append(run)
                    paper = PAPER_SAVED.get((workload, how, width))
                    saved = [run.real.blocks_saved, run.simulated.blocks_saved]
                    rows.append([workload, f"{how}, {width}", *saved, paper])
    table = Table(
        title="Per cent of the blocks that tables would need without sharing, overloaded",
        header=["workload", "", "saved", "simulated", "paper"],
        rows=rows,
    )
    notes = [
        "Which beams go on is what a model with random weights says here, and an assumption about the gaps "
        "between log-probabilities in the simulation; what samples save depends on neither.",
        durations(shown),
    ]
    charts: list[Chart] = []
    for workload in WORKLOADS:
        named = [row[1:] for row in rows if row[0] == workload]
        charts += _bars(f"Blocks saved, {workload}", "per cent", named, [1, 2, 3])
    return real_figure(results, "fig15", "Blocks saved by sharing, on a real engine", [table], charts, notes)


def fig16(results: RealResults) -> Figure:
    wanted: dict[str, tuple[Mapping[str, object], Paper]] = {
        f"{name}, {length} tokens": (
            {"workload": "translation", "shared_prefix": length},
            {"oracle": paper},
        )
        for name, (length, paper) in PREFIXES.items()
    }
    rows, notes = _against(results, wanted)
    table = Table(title="Sustained under overload", header=RATIO_HEADER, rows=rows)
    title = "A prefix that all requests share, on a real engine"
    return real_figure(results, "fig16", title, [table], _ratio_chart("Translation", rows), notes)


def fig17(results: RealResults) -> Figure:
    paper: Paper = {kind: PAPER_CHATBOT_RATIO for kind in KINDS}
    rows, notes = _against(results, {"chatbot": ({"workload": "chatbot"}, paper)})
    table = Table(title="Sustained under overload", header=RATIO_HEADER, rows=rows)
    charts = _ratio_chart("Chatbot", rows)
    return real_figure(results, "fig17", "A chatbot, on a real engine", [table], charts, notes)


def _against(
    results: RealResults, wanted: Mapping[str, tuple[Mapping[str, object], Paper]]
) -> tuple[list[list[Cell]], list[str]]:
    """Return rows of RATIO_HEADER, and notes: Quire beside each other system that has run what is wanted."""
    rows: list[list[Cell]] = []
    shown: list[Compared] = []
    for name, (fields, paper) in wanted.items():
        runs = {kind: results.find(**fields, kind=kind) for kind in KINDS}
        for kind in KINDS[1:]:
            found = alike({each: runs[each] for each in ("paged", kind)})
            if len(found) < 2:
                continue
            shown += found.values()
            row: list[Cell] = [name, NAMES[kind]]
            for side in ("real", "simulated"):
                ours, other = (getattr(found[each], side).sustained for each in ("paged", kind))
                row += [ours, other, ratio(ours, other)]
            rows.append([*row, paper.get(kind)])
    return rows, [OVERLOAD, durations(shown)]


def _ratio_chart(title: str, rows: Sequence[Sequence[Cell]]) -> list[Chart]:
    """Chart what is beside Orca (Oracle)."""
    oracles = [row for row in rows if row[1] == NAMES["oracle"]]
    return _bars(f"{title}: rate ÷ Orca (Oracle)", "ratio", oracles, [4, 7, 8])


def _bars(title: str, y: str, rows: Sequence[Sequence[Cell]], columns: Sequence[int]) -> list[Chart]:
    """Chart real, simulated and paper of the rows that have all three; no chart if there are none."""
    full = [row for row in rows if all(isinstance(row[column], float) for column in columns)]
    values = {
        label: [value for row in full if isinstance(value := row[column], float)]
        for label, column in zip(("real", "simulated", "paper"), columns, strict=True)
    }
    return [bars(title, y, [str(row[0]) for row in full], values)] if full else []
