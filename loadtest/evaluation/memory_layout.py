"""Fig. 1: where a GPU's memory goes, and how memory and throughput grow with the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.loadtest.client.lengths import SHAREGPT
from quire.loadtest.client.sessions import Recipe, Session
from quire.loadtest.evaluation.figure import Chart, Figure, Line, Table
from quire.loadtest.evaluation.setting import Setting
from quire.loadtest.simulator.geometry import A100_40GB, KV_BYTES, OPT_13B
from quire.loadtest.simulator.simulation import simulate
from quire.loadtest.simulator.step_costs import StepCosts
from quire.loadtest.simulator.systems import Kind, System

GPU_BYTES = 40e9
BATCHES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 40)
KINDS: tuple[Kind, ...] = ("paged", "max")
GB = 1e9


@dataclass(frozen=True, slots=True)
class Batches:
    """A system that runs at most so many requests at once while many wait."""

    system: System
    sessions: Sequence[Session]
    costs: StepCosts

    def __str__(self) -> str:
        return f"Fig. 1, {self.system.name}, {self.system.max_num_seqs} rows, {self.system.slots} slots"


@dataclass(frozen=True, slots=True)
class Load:
    """What a run came to: requests at once, tokens a second, and bytes given to requests, in the mean."""

    requests: float
    throughput: float
    kv_bytes: float


def run_batches(batches: Batches) -> Load:
    run = simulate(batches.sessions, batches.system, batches.costs)
    # The last requests end in ever smaller batches: what is meant is the time in which some wait.
    uses = [use for use in run.uses if use.is_short]
    seconds = sum(use.seconds for use in uses)
    given = sum((use.tokens + use.reserved + use.internal) * use.seconds for use in uses) / seconds
    requests = sum(use.requests * use.seconds for use in uses) / seconds
    tokens = sum(record.output_tokens for record in run.records)
    return Load(requests, tokens / run.seconds, given * OPT_13B.kv_bytes_per_token)


def limited(system: System, size: int) -> System:
    """Return the system with room for `size` requests at once: rows, or reservations of the longest one."""
    if system.kind == "paged":
        return replace(system, max_num_seqs=size)
    return replace(system, slots=min(system.slots, size * system.max_model_len))


def fig1(setting: Setting) -> Figure:
    costs = setting.step_costs(OPT_13B)
    sessions = setting.sessions(Recipe(SHAREGPT, 200), least=2 * BATCHES[-1])
    jobs = {
        (kind, size): Batches(limited(setting.system(kind), size), sessions, costs)
        for kind in KINDS
        for size in BATCHES
    }
    loads = dict(zip(jobs, setting.run(run_batches, list(jobs.values())), strict=True))
    names = {kind: setting.system(kind).name for kind in KINDS}
    weights = OPT_13B.weight_bytes
    others = GPU_BYTES - weights - KV_BYTES
    parts = [("parameters", weights, 65), ("KV cache", KV_BYTES, 30), ("others", others, 5)]

    def chart(title: str, y: str, value: dict[tuple[Kind, int], float]) -> Chart:
        lines = [
            Line(
                names[kind],
                [loads[kind, size].requests for size in BATCHES],
                [value[kind, size] for size in BATCHES],
            )
            for kind in KINDS
        ]
        return Chart(kind="lines", title=title, x="requests at once", y=y, lines=lines)

    memory = {pair: (weights + load.kv_bytes) / GB for pair, load in loads.items()}
    throughput = {pair: load.throughput for pair, load in loads.items()}
    return Figure(
        name="fig1",
        title="Where a GPU's memory goes, and what a larger batch needs and gives",
        source="PagedAttention, Fig. 1; section 1",
        costs=setting.costs_source(OPT_13B),
        tables=[
            Table(
                title=f"{A100_40GB.name} that serves {OPT_13B.name}",
                header=["part", "GB", "per cent", "paper: per cent"],
                rows=[[name, size / GB, 100 * size / GPU_BYTES, paper] for name, size, paper in parts],
            ),
            Table(
                title="Batches of ShareGPT's requests, at most so many at once",
                header=[
                    "at most",
                    *(f"{names[kind]}: {what}" for kind in KINDS for what in ("requests", "GB", "tok/s")),
                ],
                rows=[
                    [
                        size,
                        *(
                            value
                            for kind in KINDS
                            for value in (
                                loads[kind, size].requests,
                                memory[kind, size],
                                throughput[kind, size],
                            )
                        ),
                    ]
                    for size in BATCHES
                ],
            ),
        ],
        charts=[
            chart("Parameters and KV cache", "GB", memory),
            chart("Throughput", "tokens/s", throughput),
        ],
        notes=[
            "Existing systems are Orca (Max): a chunk for the longest that the model takes. Its batch ends "
            "at seven requests, whatever is allowed.",
            "All requests are there from the start; means are over the time in which some still wait.",
        ],
    )
