"""What was measured on a real engine, and what the simulator says of the same cases by costs fitted to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loadtest.evaluation.real.attention import AttentionTime
from loadtest.evaluation.real.case import Case, CaseRun, Outcome, measure
from loadtest.evaluation.real.results import Measured, read_measured
from loadtest.evaluation.real.transfers import TransferTime
from loadtest.evaluation.real.variants import VariantTimes
from loadtest.evaluation.setting import Setting
from loadtest.sessions import Session
from loadtest.simulator.serving import Run
from loadtest.simulator.simulation import simulate
from loadtest.simulator.step_costs import StepCosts, fit, read_records
from loadtest.simulator.systems import System


@dataclass(frozen=True, slots=True)
class SimulatedServer:
    """In place of a real engine."""

    costs: StepCosts

    def run(self, sessions: list[Session], system: System, until: float) -> Run:
        return simulate(sessions, system, self.costs, until=until)


@dataclass(frozen=True, slots=True)
class Compared:
    """One case as it went, and as it should have gone."""

    case: Case
    real: Outcome
    simulated: Outcome


@dataclass(frozen=True, slots=True)
class RealResults:
    """All that a folder holds; where there was no time for something, nothing of it."""

    runs: list[Compared]
    attention: list[AttentionTime]
    transfers: list[TransferTime]
    variants: list[VariantTimes]
    costs: dict[int, StepCosts]  # by block size
    device: str
    commit: str
    date: str
    command: str

    def describe(self) -> str:
        """In words, with the error of the costs."""
        return f"real runs on {self.device}; simulated: {self.costs[min(self.costs)].describe()}"

    def find(self, **fields: object) -> list[Compared]:
        """The runs whose cases have these values."""
        return [
            run
            for run in self.runs
            if all(getattr(run.case, name) == value for name, value in fields.items())
        ]


@dataclass(frozen=True, slots=True)
class _Job:
    case: Case
    costs: StepCosts

    def __str__(self) -> str:
        return f"predict {self.case}"


def _predict(job: _Job) -> Outcome:
    return measure(SimulatedServer(job.costs), job.case)


def read_real_results(folder: Path, setting: Setting) -> RealResults | None:
    """Read a folder of results and simulate its cases; None if it has none. Raises ValueError."""
    measured = read_measured(folder / "runs.jsonl", Measured[CaseRun])
    if not measured:
        return None
    runs = [line.data for line in measured]
    costs = {}
    for size in sorted({run.case.block_size for run in runs}):
        path = folder / f"steps-{size}.jsonl"
        costs[size] = fit(read_records(path), f"fitted to half of {path.name}")
    predicted = setting.run(_predict, [_Job(run.case, costs[run.case.block_size]) for run in runs])
    return RealResults(
        runs=[Compared(run.case, run.outcome, each) for run, each in zip(runs, predicted, strict=True)],
        attention=[line.data for line in read_measured(folder / "attention.jsonl", Measured[AttentionTime])],
        transfers=[line.data for line in read_measured(folder / "transfers.jsonl", Measured[TransferTime])],
        variants=[line.data for line in read_measured(folder / "variants.jsonl", Measured[VariantTimes])],
        costs=costs,
        device=measured[0].device,
        commit=measured[0].commit,
        date=measured[0].date,
        command=measured[0].command,
    )
