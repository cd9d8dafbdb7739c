"""Fig. 2, 12 and 13 from runs on a real engine, the paper's values and the simulator's beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quire.loadtest.analysis.knee import rate_at
from quire.loadtest.evaluation.figure import Cell, Chart, Figure, Line, Table, bars
from quire.loadtest.evaluation.memory_waste import PAPER as PAPER_SHARES
from quire.loadtest.evaluation.memory_waste import PARTS
from quire.loadtest.evaluation.real.case import Outcome
from quire.loadtest.evaluation.real.plan import BATCHES, latency_limit
from quire.loadtest.evaluation.real.prediction import Compared, RealResults, alike, durations
from quire.loadtest.evaluation.request_rates import PAPER_BATCHES, PAPER_RATIOS
from quire.loadtest.evaluation.setting import ratio
from quire.loadtest.simulator.systems import NAMES, Kind

KINDS: tuple[Kind, ...] = ("paged", "oracle", "pow2", "max")
PLAIN: dict[str, object] = {"block_size": 16, "n": 1, "beam_width": 0, "host_slots": 0, "shared_prefix": 0}
OVERLOAD = "Sustained: tokens decoded in the second half of an overload, as requests a second."


def fig2(results: RealResults) -> Figure:
    runs = _overloads(results, "ShareGPT")
    rows: list[list[Cell]] = [
        [
            NAMES[kind],
            *(run.real.shares[part] for part in PARTS),
            run.simulated.shares["tokens"],
            PAPER_SHARES[kind],
        ]
        for kind, run in runs.items()
    ]
    header = ["system", *PARTS.values(), "simulated: token states", "paper: token states"]
    title = "Per cent of the KV memory, mean over the time in which somebody waits for memory"
    shares = {label: [run.real.shares[part] for run in runs.values()] for part, label in PARTS.items()}
    names = [NAMES[kind] for kind in runs]
    chart = bars(f"KV memory under load, {results.model}", "per cent", names, shares, stacked=True)
    slots = results.runs[0].case.slots
    notes = [
        f"{slots} slots, as many as the paper had beside OPT-13B; ShareGPT-like lengths. Each run begins "
        "with empty memory, so less of what is reserved is filled than in the paper's hours.",
        durations(runs.values()),
    ]
    table = Table(title=title, header=header, rows=rows)
    title = "Share of the KV memory that holds token states, on a real engine"
    return real_figure(results, "fig2", title, [table], [chart] if runs else [], notes)


def fig12(results: RealResults) -> Figure:
    tables, charts = [], []
    notes = [
        OVERLOAD,
        "What has not ended when a run is over counts with the time it has had: an overload shows as a "
        "latency that rises, not as one without end.",
        "FasterTransformer pads a batch's prompts to the longest of them, and goes on with all of its rows "
        "until the last has ended. The same batches with nothing padded say what padding costs.",
    ]
    limit = latency_limit(results.model)
    for workload in PAPER_RATIOS:
        runs = _overloads(results, workload, (*KINDS, *BATCHES))
        if "paged" not in runs:
            continue
        sustained = {kind: (run.real.sustained, run.simulated.sustained) for kind, run in runs.items()}
        title = f"{workload}: under overload ({durations(runs.values()).rstrip('.').lower()})"
        tables.append(_ratios(title, "sustained, requests/s", sustained, PAPER_RATIOS[workload]))
        curves = {kind: _curve(results, workload, kind) for kind in KINDS}
        curves = {kind: each for kind, each in curves.items() if each and curves["paged"]}
        limits = {
            kind: (_rate(each, limit, lambda run: run.real), _rate(each, limit, lambda run: run.simulated))
            for kind, each in curves.items()
        }
        title = f"{workload}: rate at {limit * 1e3:g} ms per token"
        tables.append(_ratios(title, "requests/s", limits, PAPER_RATIOS[workload]))
        tables.append(_points(workload, curves))
        never = [NAMES[kind] for kind, curve in curves.items() if _stays_within(curve, limit)]
        if never:
            notes.append(
                f"{workload}: no rate that was tried takes {' or '.join(never)} beyond {limit * 1e3:g} ms "
                "per token. The highest stands in the table, and the rate at that limit is at least it."
            )
        charts += [_latency_chart(f"{results.model}, {workload}", curves, limit)] if curves else []
    title = "Normalised latency against the request rate, on a real engine"
    return real_figure(results, "fig12", title, tables, charts, notes)


def fig13(results: RealResults) -> Figure:
    tables, charts, shown = [], [], list[Compared]()
    notes = [
        "Each run begins with empty memory: all sequences are short at first, so that more of them fit than "
        "later, and than in the paper's hours."
    ]
    for workload, (_, paper) in PAPER_BATCHES.items():
        runs = _overloads(results, workload)
        if not runs:
            continue
        shown += runs.values()
        rows: list[list[Cell]] = [
            [NAMES[kind], run.real.mean_requests, run.simulated.mean_requests, paper[kind]]
            for kind, run in runs.items()
        ]
        title = f"{workload}: mean number of requests under way, overloaded"
        header = ["system", "real", "simulated", "paper"]
        tables.append(Table(title=title, header=header, rows=rows))
        values = {
            "real": [run.real.mean_requests for run in runs.values()],
            "simulated": [run.simulated.mean_requests for run in runs.values()],
            "paper": [paper[kind] for kind in runs],
        }
        names = [NAMES[kind] for kind in runs]
        charts.append(bars(f"Batched requests, {workload}", "requests", names, values))
    notes.append(durations(shown))
    return real_figure(
        results, "fig13", "Requests under way at once, on a real engine", tables, charts, notes
    )


def _ratios(
    title: str,
    rate: str,
    rates: Mapping[Kind, tuple[float | None, float | None]],
    paper: Mapping[Kind, Cell],
) -> Table:
    """Compare rates, real and simulated, with Quire's."""
    rows: list[list[Cell]] = []
    for kind, each in rates.items():
        ours = [ratio(quire, other) for quire, other in zip(rates["paged"], each, strict=True)]
        rows.append([NAMES[kind], *each, *ours, paper.get(kind)])
    header = ["system", rate, "simulated", "Quire ÷ it", "simulated", "paper: vLLM ÷ it"]
    return Table(title=title, header=header, rows=rows)


def _points(workload: str, curves: Mapping[Kind, list[Compared]]) -> Table:
    rows: list[list[Cell]] = [
        [
            NAMES[kind],
            run.case.rate,
            run.case.until,
            float(run.real.finished),
            1e3 * run.real.normalized_latency,
            1e3 * run.simulated.normalized_latency,
        ]
        for kind, runs in curves.items()
        for run in runs
    ]
    header = ["system", "requests/s", "seconds", "requests that ended", "ms per token", "simulated"]
    return Table(title=f"{workload}: runs at each rate", header=header, rows=rows)


def _overloads(results: RealResults, workload: str, kinds: Sequence[Kind] = KINDS) -> dict[Kind, Compared]:
    fields = {**PLAIN, "workload": workload, "share": None}
    return alike({kind: results.find(**fields, kind=kind) for kind in kinds})


def _curve(results: RealResults, workload: str, kind: Kind) -> list[Compared]:
    """Return open loops, by rate."""
    runs = [run for run in results.find(**PLAIN, workload=workload, kind=kind) if run.case.share is not None]
    return sorted(runs, key=lambda run: run.case.rate)


def _rate(curve: list[Compared], limit: float, side: Callable[[Compared], Outcome]) -> float | None:
    return rate_at([(run.case.rate, side(run).normalized_latency) for run in curve], limit)


def _stays_within(curve: list[Compared], limit: float) -> bool:
    return all(run.real.normalized_latency <= limit for run in curve)


def _latency_chart(title: str, curves: dict[Kind, list[Compared]], limit: float) -> Chart:
    lines = []
    for kind, runs in curves.items():
        rates = [run.case.rate for run in runs]
        lines.append(Line(NAMES[kind], rates, [run.real.normalized_latency for run in runs]))
        lines.append(
            Line(
                f"{NAMES[kind]}, simulated",
                rates,
                [run.simulated.normalized_latency for run in runs],
                dashed=True,
            )
        )
    y = "normalised latency, s/token"
    return Chart(kind="lines", title=title, x="requests/s", y=y, lines=lines, limit=limit)


def real_figure(
    results: RealResults, name: str, title: str, tables: list[Table], charts: list[Chart], notes: list[str]
) -> Figure:
    """Return a figure without the tables that nothing was measured for."""
    return Figure(
        name=f"{name}-real",
        title=title,
        source=f"PagedAttention, Fig. {name.removeprefix('fig')}" if name.startswith("fig") else "Ours",
        costs=results.describe(),
        tables=[table for table in tables if table.rows],
        charts=charts,
        notes=notes,
    )
