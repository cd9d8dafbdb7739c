"""Pair what was measured on a real engine with what the simulator says of it by costs fitted to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quire.loadtest.client.sessions import Session
from quire.loadtest.evaluation.real.attention import AttentionTime, BlockSizeTime
from quire.loadtest.evaluation.real.case import Case, CaseRun, Outcome, measure
from quire.loadtest.evaluation.real.results import Measured, read_measured
from quire.loadtest.evaluation.real.transfers import TransferTime
from quire.loadtest.evaluation.real.variants import VariantTimes
from quire.loadtest.evaluation.real.ways import WayOutcome
from quire.loadtest.evaluation.setting import Setting
from quire.loadtest.simulator.serving import Run
from quire.loadtest.simulator.simulation import simulate
from quire.loadtest.simulator.step_costs import StepCosts, fit, read_records
from quire.loadtest.simulator.systems import System

FITTED = 16  # the block size whose steps are recorded over a grid
LONG_SECONDS = 60.0  # of a run whose memory is full for most of it

Key = TypeVar("Key")


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
    block_sizes: list[BlockSizeTime]
    models: list[WayOutcome]
    costs: dict[int, StepCosts]  # by block size
    model: str
    device: str
    where: dict[str, dict[str, str]]  # by a file's name: commits of its lines, last date, first command

    def describe(self) -> str:
        """Tell in words where they come from, with the error of the costs."""
        return f"real runs of {self.model} on {self.device}; simulated: {self.fitted.describe()}"

    @property
    def fitted(self) -> StepCosts:
        """Return the costs that rest on most steps."""
        return self.costs[FITTED if FITTED in self.costs else min(self.costs)]

    def find(self, **fields: object) -> list[Compared]:
        """Return the runs whose cases have these values."""
        return [
            run
            for run in self.runs
            if all(getattr(run.case, name) == value for name, value in fields.items())
        ]


def alike(groups: Mapping[Key, Sequence[Compared]]) -> dict[Key, Compared]:
    """Choose one run of each group: long ones if all groups that have any have a long one, else short ones.

    A folder may hold both, since measuring anew goes on where it stopped. A group without one is left out.
    """
    by_length = {key: sorted(runs, key=lambda run: run.case.until) for key, runs in groups.items() if runs}
    are_long = all(runs[-1].case.until >= LONG_SECONDS for runs in by_length.values())
    chosen = {key: runs[-1 if are_long else 0] for key, runs in by_length.items()}
    return {key: run for key, run in chosen.items() if (run.case.until >= LONG_SECONDS) == are_long}


def durations(runs: Iterable[Compared]) -> str:
    """Say how long runs take, as a figure's note."""
    seconds = sorted({run.case.until for run in runs})
    if len(seconds) <= 1:
        return "".join(f"Each run takes {each:g} s." for each in seconds)
    return f"A run takes {seconds[0]:g} to {seconds[-1]:g} s; long ones are compared with long ones only."


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
    attention = read_measured(folder / "attention.jsonl", Measured[AttentionTime])
    transfers = read_measured(folder / "transfers.jsonl", Measured[TransferTime])
    variants = read_measured(folder / "variants.jsonl", Measured[VariantTimes])
    block_sizes = read_measured(folder / "block-sizes.jsonl", Measured[BlockSizeTime])
    models = read_measured(folder / "models.jsonl", Measured[WayOutcome])
    files: dict[str, Sequence[Measured[Any]]] = {
        "runs": measured,
        "attention": attention,
        "transfers": [*transfers, *measured],  # the figure of the one has of the others, too
        "variants": variants,
        "models": models,
    }
    predicted = setting.run(_predict, [_Job(run.case, costs[run.case.block_size]) for run in runs])
    return RealResults(
        runs=[Compared(run.case, run.outcome, each) for run, each in zip(runs, predicted, strict=True)],
        attention=[line.data for line in attention],
        transfers=[line.data for line in transfers],
        variants=[line.data for line in variants],
        block_sizes=sorted((line.data for line in block_sizes), key=lambda each: each.block_size),
        models=[line.data for line in models],
        costs=costs,
        model=measured[0].model,
        device=measured[0].device,
        where={
            name: {
                "commit": ", ".join(dict.fromkeys(line.commit for line in lines)),
                "date": lines[-1].date,
                "command": lines[0].command,
            }
            for name, lines in files.items()
            if lines
        },
    )
