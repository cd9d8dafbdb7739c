"""Set how large the experiments are, and run what they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TypeVar

from quire.loadtest.analysis.knee import find_knee, rate_at
from quire.loadtest.client.arrivals import arrival_times
from quire.loadtest.client.sessions import Recipe, Session, draw_sessions, due_at
from quire.loadtest.simulator.geometry import A100_40GB, OPT_13B, Model, Server, kv_slots
from quire.loadtest.simulator.simulation import simulate
from quire.loadtest.simulator.step_costs import StepCosts, roofline
from quire.loadtest.simulator.systems import Kind, System

LATENCY_LIMIT = 0.1  # seconds a token: about four times an unloaded OPT-13B; rates are compared there
BEYOND = 4.0  # a curve ends at so many times the limit

Job = TypeVar("Job")
Answer = TypeVar("Answer")
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Setting:
    """`scale` 1 is the size of the committed report, smaller ones are quicker and rougher.

    `slots`: tokens of KV memory; those of an A100 with 40 GB beside a 13B model, as in table 1. Without
    `costs`, a step costs what the roofline of that GPU says.
    """

    scale: float = 1.0
    slots: int = kv_slots(OPT_13B)
    max_model_len: int = OPT_13B.max_model_len
    seed: int = 0
    processes: int = 1
    costs: StepCosts | None = None
    on_done: Callable[[str], None] = lambda text: None

    def count(self, requests: int, least: int = 8) -> int:
        return max(least, round(requests * self.scale))

    def step_costs(self, model: Model, block_size: int = 16, pieces: int = 1) -> StepCosts:
        return self.costs or roofline(model, A100_40GB, block_size, pieces)

    def server_costs(self, server: Server) -> StepCosts:
        """Return what a step costs on one of the paper's servers; fits are of one GPU, so of the first."""
        if server.ranks.size == 1:
            return self.step_costs(server.model)
        return roofline(server.model, server.device, 16, ranks=server.ranks)

    def costs_source(self, model: Model) -> str:
        """Tell in words where costs come from, with the error of a fit."""
        return self.step_costs(model).describe()

    def system(self, kind: Kind, block_size: int = 16) -> System:
        return System(kind, self.slots, self.max_model_len, block_size)

    def system_on(self, server: Server, kind: Kind) -> System:
        """Return a system with the memory that it has on a server, as much smaller as this setting's is."""
        slots = self.slots * server.slots // kv_slots(OPT_13B)
        return System(kind, slots, self.max_model_len, 16)

    def sessions(self, recipe: Recipe, least: int = 8) -> list[Session]:
        """Draw a recipe's sessions with this setting's seed and size."""
        count = self.count(recipe.count, least)
        return draw_sessions(dataclasses.replace(recipe, seed=self.seed, count=count))

    def curve(
        self,
        label: str,
        system: System,
        sessions: Sequence[Session],
        *rates: float,
        model: Model = OPT_13B,
        pieces: int = 1,
        costs: StepCosts | None = None,
        search: Search | None = None,
    ) -> Curve:
        """costs: of a step; if left out, `step_costs` of the model. search: if left out, all rates."""
        costs = costs or self.step_costs(model, system.block_size, pieces)
        return Curve(label, system, sessions, rates, costs, self.seed, search)

    def run_curves(self, curves: Mapping[Key, Curve]) -> dict[Key, list[Outcome]]:
        """Return the outcomes of each curve, by its rates."""
        return dict(zip(curves, self.run(run_curve, list(curves.values())), strict=True))

    def run_points(self, points: Mapping[Key, Curve]) -> dict[Key, Outcome]:
        """Return the outcome of each curve of one rate."""
        return {key: outcome for key, (outcome,) in self.run_curves(points).items()}

    def run(self, function: Callable[[Job], Answer], jobs: Sequence[Job]) -> list[Answer]:
        """Run `function` of every job, in order, in so many processes."""
        if self.processes == 1:
            return [self._done(function(job), job) for job in jobs]
        with ProcessPoolExecutor(self.processes, mp_context=get_context("spawn")) as pool:
            return [
                self._done(answer, job) for answer, job in zip(pool.map(function, jobs), jobs, strict=True)
            ]

    def _done(self, answer: Answer, job: Job) -> Answer:
        self.on_done(str(job))
        return answer


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one run, as far as experiments look at it."""

    rate: float
    normalized_latency: float
    mean_requests: float
    shares: dict[str, float]
    blocks_saved: float
    wasted_in_blocks: float
    preemptions: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Search:
    """Runs that last about as long at any rate; the knee is found by so many halvings between two rates."""

    seconds: float
    fewest: int  # requests of a run, however long that takes
    halvings: int


@dataclass(frozen=True, slots=True)
class Curve:
    """A system that serves the same sessions at rising rates, until latency is far beyond the limit.

    With `search` it is until latency is beyond the limit, and then between the last two rates.
    """

    label: str
    system: System
    sessions: Sequence[Session]
    rates: tuple[float, ...]
    costs: StepCosts
    seed: int
    search: Search | None = None

    def __str__(self) -> str:
        return self.label

    def sessions_at(self, rate: float) -> Sequence[Session]:
        """Return the sessions of a run at a rate."""
        if self.search is None:
            return self.sessions
        return self.sessions[: max(self.search.fewest, round(rate * self.search.seconds))]


def run_curve(curve: Curve) -> list[Outcome]:
    if curve.search is not None:
        return _search(curve, curve.search.halvings)
    outcomes: list[Outcome] = []
    for rate in curve.rates:
        outcomes.append(run_sessions(curve.sessions, rate, curve.system, curve.costs, curve.seed))
        if outcomes[-1].normalized_latency > BEYOND * LATENCY_LIMIT:
            break
    return outcomes


def _search(curve: Curve, halvings: int) -> list[Outcome]:
    outcomes: dict[float, Outcome] = {}

    def latency(rate: float) -> float:
        sessions = curve.sessions_at(rate)
        outcomes[rate] = run_sessions(sessions, rate, curve.system, curve.costs, curve.seed)
        return outcomes[rate].normalized_latency

    find_knee(latency, curve.rates, LATENCY_LIMIT, halvings)
    return [outcomes[rate] for rate in sorted(outcomes)]


def run_sessions(
    sessions: Sequence[Session], rate: float, system: System, costs: StepCosts, seed: int
) -> Outcome:
    """Simulate Poisson arrivals; the same seed gives every system the same requests at the same times."""
    run = simulate(due_at(sessions, arrival_times(len(sessions), rate, 1.0, seed)), system, costs)
    return Outcome(
        rate=rate,
        normalized_latency=run.normalized_latency(),
        mean_requests=run.mean_requests(),
        shares=run.shares_under_load(),
        blocks_saved=run.blocks_saved(),
        wasted_in_blocks=run.wasted_in_blocks(),
        preemptions=run.preemptions,
        cached_tokens=sum(record.cached_tokens for record in run.records),
    )


def sustained(outcomes: Iterable[Outcome]) -> float | None:
    """Return the rate at which the mean normalised latency crosses LATENCY_LIMIT."""
    return rate_at([(outcome.rate, outcome.normalized_latency) for outcome in outcomes], LATENCY_LIMIT)


def ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other
