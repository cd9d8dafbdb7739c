"""Fig. 12 and 13: normalised latency against the request rate, and how many requests run at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from quire.loadtest.client.lengths import ALPACA, SHAREGPT, Recorded
from quire.loadtest.client.sessions import Recipe, draw_sessions
from quire.loadtest.evaluation.figure import Cell, Chart, Figure, Line, Table, bars
from quire.loadtest.evaluation.setting import LATENCY_LIMIT, Outcome, Search, Setting, ratio, sustained
from quire.loadtest.simulator.geometry import OPT_13B, SERVERS
from quire.loadtest.simulator.systems import NAMES, Kind

KINDS: tuple[Kind, ...] = ("paged", "oracle", "pow2", "max", "padded")
MOST = 4000  # requests of a run
# The lowest rate of each system on the first server; the others are each twice the one before.
WORKLOADS: dict[str, tuple[Recipe, dict[Kind, float]]] = {
    "ShareGPT": (
        Recipe(SHAREGPT, MOST),
        {"paged": 0.8, "oracle": 0.4, "pow2": 0.4, "max": 0.2, "padded": 0.05},
    ),
    "Alpaca": (
        Recipe(ALPACA, MOST),
        {"paged": 12.0, "oracle": 8.0, "pow2": 4.0, "max": 1.0, "padded": 0.2},
    ),
}
# The same rates with the lengths of real conversations, on the first server.
RECORDED = {"ShareGPT, recorded": (Recipe(Recorded(), MOST), WORKLOADS["ShareGPT"][1])}
DOUBLINGS = 8
# On the other servers: so many times those rates, but for whole batches, whose rates memory hardly changes.
RATE_SCALES = {"OPT-13B": 1.0, "OPT-66B": 0.5, "OPT-175B": 2.0}
SEARCH = Search(seconds=300.0, fewest=60, halvings=3)
# How sure a knee is: the same rate with other requests, and for an hour.
CHECKED: tuple[Kind, ...] = ("paged", "oracle")
SEEDS = (1, 2, 3)
HOUR = 3600.0
# Section 6.2: how many times the rate of each baseline vLLM sustains. None are given for Alpaca.
PAPER_RATIOS: dict[str, dict[Kind, Cell]] = {
    "ShareGPT": {"oracle": "1.7–2.7", "max": "2.7–8", "padded": "up to 22"},
    "Alpaca": {},
    "ShareGPT, recorded": {"oracle": "1.7–2.7", "max": "2.7–8", "padded": "up to 22"},
}
BATCH_RUNS = {"ShareGPT": (Recipe(SHAREGPT, 500), 6.0), "Alpaca": (Recipe(ALPACA, 1500), 100.0)}  # overload
# Fig. 13, with the rate at which it was taken.
PAPER_BATCHES: dict[str, tuple[float, dict[Kind, float]]] = {
    "ShareGPT": (2.0, {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42}),
    "Alpaca": (30.0, {"max": 7.00, "pow2": 43.24, "oracle": 72.75, "paged": 132.44}),
}

# Table 1: GB of parameters, and tokens whose keys and values fit.
PAPER_SERVERS = {"OPT-13B": (26, 15_700), "OPT-66B": (132, 9_700), "OPT-175B": (346, 60_100)}


def latency_chart(title: str, lines: Mapping[str, Sequence[Outcome]]) -> Chart:
    return Chart(
        kind="lines",
        title=title,
        x="requests/s",
        y="normalised latency, s/token",
        lines=[
            Line(
                label,
                [outcome.rate for outcome in outcomes],
                [outcome.normalized_latency for outcome in outcomes],
            )
            for label, outcomes in lines.items()
        ],
        limit=LATENCY_LIMIT,
        top=5 * LATENCY_LIMIT,
    )


def rate_table(
    title: str, outcomes: Mapping[Kind, Sequence[Outcome]], paper_header: str, paper: Mapping[Kind, Cell]
) -> Table:
    """Compare the rates that systems sustain, with Quire's and with the paper's ratio."""
    rates = {kind: sustained(each) for kind, each in outcomes.items()}
    return Table(
        title=f"{title} at {LATENCY_LIMIT * 1e3:g} ms per token",
        header=["system", "requests/s", "Quire ÷ it", paper_header],
        rows=[
            [NAMES[kind], rate, ratio(rates["paged"], rate), paper.get(kind)] for kind, rate in rates.items()
        ],
    )


def fig12(setting: Setting) -> Figure:
    """Simulate all panels: OPT-13B, 66B and 175B on the servers of table 1, with two workloads each."""
    tables, checks, charts = [servers_table()], [], []
    for server in SERVERS:
        name = server.model.name
        costs = setting.server_costs(server)
        workloads = WORKLOADS | RECORDED if server is SERVERS[0] else WORKLOADS
        for workload, (recipe, lowest) in workloads.items():
            sessions = setting.sessions(recipe)
            curves = {
                kind: setting.curve(
                    f"{name}, {workload}, {NAMES[kind]}",
                    setting.system_on(server, kind),
                    sessions,
                    *doubled(lowest[kind] * (1.0 if kind == "padded" else RATE_SCALES[name])),
                    costs=costs,
                    search=SEARCH,
                )
                for kind in KINDS
            }
            outcomes = setting.run_curves(curves)
            if server is SERVERS[0] and workload == "ShareGPT":
                checks.append(checks_table(setting, recipe, outcomes))
            title = f"{name}, {workload}: rate"
            tables.append(rate_table(title, outcomes, "paper: vLLM ÷ it", PAPER_RATIOS[workload]))
            named = {NAMES[kind]: each for kind, each in outcomes.items()}
            charts.append(latency_chart(f"{name}, {workload}", named))
    return Figure(
        name="fig12",
        title="Normalised latency against the request rate",
        source="PagedAttention, Fig. 12; section 6.2, table 1",
        costs="; ".join(setting.server_costs(server).describe() for server in SERVERS),
        tables=[*tables, *checks],
        charts=charts,
        notes=[
            "The paper's ranges are over OPT-13B, 66B and 175B.",
            f"Requests come for {SEARCH.seconds / 60:g} minutes at each rate, {SEARCH.fewest} to {MOST} of "
            f"them; the knee is found by {SEARCH.halvings} halvings between a rate and its double.",
            "Minutes end before a queue has grown: at the rates of the last table an hour is an overload. So "
            "rates here are what minutes bear, and the ratios are theirs.",
            "Recorded: lengths of real conversations (Fig. 11), whose means are not quite the paper's.",
            "Several GPUs: each reads its part of the weights and of the cache and does its part of the "
            "products, and two sums over the GPUs follow in every layer.",
            "FasterTransformer pads prompts to the longest of a batch, and all of its rows go on until the "
            "last has ended. Orca's steps, and its own, cost what Quire's do, so the baselines do better "
            "than theirs did.",
        ],
    )


def doubled(lowest: float) -> tuple[float, ...]:
    return tuple(lowest * 2**i for i in range(DOUBLINGS))


def checks_table(setting: Setting, recipe: Recipe, outcomes: Mapping[Kind, Sequence[Outcome]]) -> Table:
    """Run other requests at the knees that were found, and as many as come in an hour."""
    knees = {kind: rate for kind in CHECKED if (rate := sustained(outcomes[kind])) is not None}
    points = {}
    for kind, knee in knees.items():
        for seed, seconds in (*((seed, SEARCH.seconds) for seed in SEEDS), (SEEDS[0], HOUR)):
            count = max(SEARCH.fewest, round(knee * seconds))
            sessions = draw_sessions(dataclasses.replace(recipe, seed=seed, count=count))
            own = dataclasses.replace(setting, seed=seed)
            label = f"{NAMES[kind]}, requests of seed {seed}, {seconds / 60:g} minutes"
            points[kind, seed, seconds] = own.curve(label, setting.system(kind), sessions, knee)
    found = {key: 1e3 * each.normalized_latency for key, each in setting.run_points(points).items()}
    minutes = f"{SEARCH.seconds / 60:g} minutes"
    return Table(
        title="How sure a knee is: ms per token at the rates of OPT-13B on ShareGPT, with other requests",
        header=["system", "requests/s", *(f"seed {seed}, {minutes}" for seed in SEEDS), "an hour"],
        rows=[
            [
                NAMES[kind],
                knee,
                *(found[kind, seed, SEARCH.seconds] for seed in SEEDS),
                found[kind, SEEDS[0], HOUR],
            ]
            for kind, knee in knees.items()
        ],
    )


def servers_table() -> Table:
    """Compare the servers with table 1 of the paper."""
    return Table(
        title="Servers (table 1)",
        header=["model", "GPUs", "parameters, GB", "paper", "KV slots", "paper: KV slots"],
        rows=[
            [
                server.model.name,
                f"{server.ranks.size} × {server.device.name}",
                server.model.weight_bytes / 1e9,
                PAPER_SERVERS[server.model.name][0],
                server.slots,
                PAPER_SERVERS[server.model.name][1],
            ]
            for server in SERVERS
        ],
    )


def fig13(setting: Setting) -> Figure:
    tables, charts = [], []
    kinds = tuple(kind for kind in KINDS if kind != "padded")
    names = [NAMES[kind] for kind in kinds]
    for workload, (rate, paper) in PAPER_BATCHES.items():
        recipe, overload = BATCH_RUNS[workload]
        sessions = setting.sessions(recipe)
        points = {
            (kind, each): setting.curve(f"{workload}, {NAMES[kind]}", setting.system(kind), sessions, each)
            for kind in kinds
            for each in (rate, overload)
        }
        found = {pair: outcome.mean_requests for pair, outcome in setting.run_points(points).items()}
        header = ["system", f"at {rate:g} requests/s", f"at {overload:g} requests/s", "paper"]
        rows: list[list[Cell]] = [
            [NAMES[kind], found[kind, rate], found[kind, overload], paper[kind]] for kind in kinds
        ]
        tables.append(Table(title=f"{workload}: mean number of requests under way", header=header, rows=rows))
        values = {
            "overload": [found[kind, overload] for kind in kinds],
            "paper": [paper[kind] for kind in kinds],
        }
        charts.append(bars(f"Batched requests, {workload}", "requests", names, values))
    return Figure(
        name="fig13",
        title="Requests under way at once",
        source="PagedAttention, Fig. 13; section 6.2",
        costs=setting.costs_source(OPT_13B),
        tables=tables,
        charts=charts,
        notes=[
            "By the roofline an A100 is quicker than vLLM was in 2023, so that Quire is not short of memory "
            "at the paper's rates; the last rate overloads every system, as the paper's did.",
            "At most 256 sequences run at once.",
        ],
    )
