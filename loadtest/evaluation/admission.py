"""Section 4.5: who is let in after a preemption, by the paper's rule and by Quire's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quire.engine.config import EngineConfig, PreemptionMode
from quire.engine.core import EngineCore
from quire.loadtest.client.arrivals import arrival_times
from quire.loadtest.client.lengths import ALPACA, SHAREGPT, LogNormal, Shape
from quire.loadtest.client.sessions import Recipe, Session, Turn, due_at
from quire.loadtest.evaluation.figure import Cell, Chart, Figure, Line, Table
from quire.loadtest.evaluation.setting import Setting, ratio
from quire.loadtest.simulator.geometry import OPT_13B
from quire.loadtest.simulator.serving import Run, serve
from quire.loadtest.simulator.simulation import simulate
from quire.loadtest.simulator.step_costs import StepCosts
from quire.loadtest.simulator.systems import System
from quire.loadtest.simulator.virtual_runner import CostedRunner, VirtualClock
from quire.service.demo import MODEL_FOLDER

Rule = Literal["back", "completed"]
RULES: dict[Rule, str] = {"back": "Quire: all are back", "completed": "paper: all have completed"}
WORKLOADS = {
    "ShareGPT": (Recipe(SHAREGPT, 400), (2.8, 3.2, 3.6, 4.5, 6.0)),
    "Alpaca": (Recipe(ALPACA, 1200), (50.0, 60.0, 80.0)),
}
MODES: tuple[PreemptionMode, ...] = ("recompute", "swap")
# On the engine: the demo model, with so little memory that it is short.
SMALL = Recipe(Shape(LogNormal(60, 0.8, 4, 250), LogNormal(80, 0.8, 4, 250)), 40)
SMALL_SLOTS, SMALL_RATES = 2048, (8.0, 16.0, 32.0)


@dataclass(frozen=True, slots=True)
class _Job:
    label: str
    drawn: Sequence[Session]
    rate: float
    system: System
    costs: StepCosts
    seed: int

    def __str__(self) -> str:
        return f"{self.label}, {self.system.preemption}, {self.system.admission}, {self.rate:g}/s"

    def sessions(self) -> list[Session]:
        """Return the sessions at their times, a Poisson schedule."""
        return due_at(self.drawn, arrival_times(len(self.drawn), self.rate, 1.0, self.seed))


@dataclass(frozen=True, slots=True)
class _Outcome:
    latency: float  # seconds a token, normalised: the mean
    worst: float  # … the 99th percentile
    preemptions: int
    throughput: float  # output tokens a second, from the first request to the last token

    @classmethod
    def of(cls, run: Run) -> _Outcome:
        latencies = [record.normalized_latency for record in run.records]
        return cls(
            latency=float(np.mean(latencies)),
            worst=float(np.quantile(latencies, 0.99)),
            preemptions=run.preemptions,
            throughput=sum(record.output_tokens for record in run.records) / run.seconds,
        )


def _simulated(job: _Job) -> _Outcome:
    return _Outcome.of(simulate(job.sessions(), job.system, job.costs))


def _on_engine(job: _Job) -> _Outcome:
    """The demo model computes every step and moves every block; a step takes what it is said to cost."""
    from quire.engine.startup import start_engine

    system, clock = job.system, VirtualClock()
    config = EngineConfig(
        model=str(MODEL_FOLDER),
        device="cpu",
        max_num_seqs=system.max_num_seqs,
        max_num_batched_tokens=system.max_num_batched_tokens,
        block_size=system.block_size,
        num_gpu_blocks_override=system.num_blocks,
        preemption_mode=system.preemption,
        enable_prefix_caching=False,
    )
    core, info = start_engine(config)
    runner = CostedRunner(core.runner, job.costs, clock)
    core = EngineCore(system.scheduler(info.vocab_size), runner, clock)
    sessions = [_within(info.vocab_size, session) for session in job.sessions()]
    return _Outcome.of(serve(sessions, core, system.memory(), system.slots, clock, runner))


def _within(vocab_size: int, session: Session) -> Session:
    """The same session, with tokens of the model's."""
    (turn,) = session.turns
    prompt = [int(token) % vocab_size for token in turn.prompt]
    return Session(turns=[Turn(prompt=prompt, output_len=turn.output_len)], at=session.at)


def _jobs(
    setting: Setting, label: str, recipe: Recipe, rates: tuple[float, ...], system: System
) -> list[_Job]:
    costs, sessions = setting.step_costs(OPT_13B), setting.sessions(recipe)
    return [
        _Job(label, sessions, rate, dataclasses.replace(memory, admission=rule), costs, setting.seed)
        for mode in MODES
        for memory in [
            dataclasses.replace(system, preemption=mode, host_slots=system.slots if mode == "swap" else 0)
        ]
        for rate in rates
        for rule in RULES
    ]


def admission(setting: Setting) -> Figure:
    tables, charts = [], []
    for name, (recipe, rates) in WORKLOADS.items():
        jobs = _jobs(setting, name, recipe, rates, setting.system("paged"))
        outcomes = list(zip(jobs, setting.run(_simulated, jobs), strict=True))
        tables.append(_table(name, outcomes))
        charts.append(_chart(name, outcomes))
    small = System("paged", SMALL_SLOTS, 512, max_num_seqs=64)
    jobs = _jobs(setting, "demo model", SMALL, SMALL_RATES, small)
    predicted, computed = setting.run(_simulated, jobs), setting.run(_on_engine, jobs)
    tables.append(_table("demo model on the engine", list(zip(jobs, computed, strict=True))))
    difference = max(
        abs(one.latency / other.latency - 1) for one, other in zip(predicted, computed, strict=True)
    )
    return Figure(
        name="admission",
        title="Who is let in after a preemption",
        source="PagedAttention, section 4.5",
        costs=setting.costs_source(OPT_13B),
        tables=tables,
        charts=charts,
        notes=[
            "The paper lets no new request in until all that were preempted have completed, Quire until they "
            "are back in device memory. Both bring them back before all others, oldest first.",
            "Throughput: output tokens a second, from the first request to the last token.",
            f"On the engine: real steps and transfers of the demo model on a CPU, {SMALL_SLOTS} slots; only "
            "time is virtual, so that it does not depend on the machine. The simulator gives the same "
            f"latencies within {100 * difference:.2g} %.",
        ],
    )


def _table(name: str, outcomes: list[tuple[_Job, _Outcome]]) -> Table:
    """A row for each rate and way to preempt: each quantity by Quire's rule, and by the paper's."""
    rows: list[list[Cell]] = []
    for (job, one), (_, other) in zip(outcomes[::2], outcomes[1::2], strict=True):
        rows.append(
            [
                f"{job.rate:g}, {job.system.preemption}",
                1e3 * one.latency,
                1e3 * other.latency,
                ratio(other.latency, one.latency),
                1e3 * one.worst,
                1e3 * other.worst,
                float(one.preemptions),
                float(other.preemptions),
                one.throughput,
                other.throughput,
            ]
        )
    quantities = ("ms/token", "p99 ms/token", "preemptions", "tokens/s")
    first, *others = ([f"{quantity}, back", f"{quantity}, completed"] for quantity in quantities)
    header = ["requests/s", *first, "completed ÷ back", *(name for pair in others for name in pair)]
    title = f"{name}: new requests come in once those preempted are back, or have completed"
    return Table(title=title, header=header, rows=rows)


def _chart(name: str, outcomes: list[tuple[_Job, _Outcome]]) -> Chart:
    lines = []
    for mode in MODES:
        for rule, label in RULES.items():
            chosen = [
                (job.rate, outcome.latency)
                for job, outcome in outcomes
                if (job.system.preemption, job.system.admission) == (mode, rule)
            ]
            x, y = [rate for rate, _ in chosen], [latency for _, latency in chosen]
            lines.append(Line(f"{label}, {mode}", x, y, dashed=rule == "completed"))
    return Chart(
        kind="lines",
        title=f"OPT-13B, {name}: admission",
        x="requests/s",
        y="normalised latency, s/token",
        lines=lines,
    )
