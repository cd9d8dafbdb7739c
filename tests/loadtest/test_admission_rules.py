"""The paper's rule of admission beside Quire's (section 4.5), in the simulator and on the engine."""

from __future__ import annotations

import dataclasses

import pytest

from quire.engine.messages import Request, SamplingParams
from quire.engine.schedule.plan import StepPlan
from quire.loadtest.client.lengths import LogNormal, Shape
from quire.loadtest.client.sessions import Recipe, draw_sessions
from quire.loadtest.evaluation import admission
from quire.loadtest.evaluation.setting import Setting
from quire.loadtest.simulator.geometry import A100_40GB, OPT_13B
from quire.loadtest.simulator.simulation import simulate
from quire.loadtest.simulator.step_costs import roofline
from quire.loadtest.simulator.systems import System

COSTS = roofline(OPT_13B, A100_40GB, 16)
SHORT = Shape(LogNormal(30, 0.8, 4, 100), LogNormal(60, 0.8, 4, 150))
SHORTER = Shape(LogNormal(20, 0.8, 4, 60), LogNormal(30, 0.8, 4, 75))  # for the engine, which computes them
SMALL = System("paged", 1024, 256, max_num_seqs=64)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_papers_rule_admits_nobody_until_all_preempted_have_completed(
    preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = dataclasses.replace(SMALL, preemption=preemption, host_slots=1024, admission="completed")
    scheduler = system.scheduler()
    kind, seen = type(scheduler), {"new": 0, "held": 0}
    plain = kind.schedule
    preempted: set[int] = set()

    def schedule(self: object, now: float = 0.0, only: object = None) -> StepPlan | None:
        state = self.state
        new = {group for group in state.waiting if group.queue_seconds is None}
        before = {group.request.id for group in state.running}
        preempted.intersection_update(group.request.id for group in (*state.running, *state.waiting))
        plan = plain(self, now, only)
        admitted = {group for group in new if group.queue_seconds is not None}
        seen["new"] += len(admitted)
        if preempted:
            seen["held"] += bool(new)
            assert not admitted, "a new request was admitted while one that was preempted had not completed"
        running = {group.request.id for group in state.running}
        preempted.update(before - running)  # nobody ends in a schedule
        return plan

    monkeypatch.setattr(kind, "schedule", schedule)
    job = admission._Job("", draw_sessions(Recipe(SHORT, 40)), 40.0, system, COSTS, 0)
    run = simulate(job.sessions(), system, COSTS)
    assert len(run.records) == seen["new"] == 40
    assert run.preemptions > 0 and seen["held"] > 0


def test_without_preemptions_both_rules_are_one() -> None:
    sessions = draw_sessions(Recipe(SHORT, 20))
    jobs = [
        admission._Job("", sessions, 4.0, dataclasses.replace(SMALL, admission=rule), COSTS, 0)
        for rule in admission.RULES
    ]
    ours, papers = map(admission._simulated, jobs)
    assert ours == papers and ours.preemptions == 0


def test_the_figure_in_miniature(monkeypatch: pytest.MonkeyPatch) -> None:
    """More preemptions by Quire's rule, and shorter waits; the engine does what the simulator says."""
    monkeypatch.setattr(admission, "WORKLOADS", {"ShareGPT": (Recipe(SHORT, 36), (30.0, 60.0))})
    monkeypatch.setattr(admission, "SMALL", Recipe(SHORTER, 12))
    monkeypatch.setattr(admission, "SMALL_SLOTS", 256)
    monkeypatch.setattr(admission, "SMALL_RATES", (60.0,))
    figure = admission.admission(Setting(slots=1024, max_model_len=256))
    simulated, on_engine = figure.tables
    assert [row[0] for row in simulated.rows] == [
        f"{rate}, {mode}" for mode in ("recompute", "swap") for rate in (30, 60)
    ]
    back, completed = (
        simulated.header.index("preemptions, back"),
        simulated.header.index("preemptions, completed"),
    )
    for row in (*simulated.rows, *on_engine.rows):
        assert row[back] >= row[completed] > 0
    assert "within 0 %" in figure.notes[-1]


def test_a_request_of_a_vocabulary_is_the_models() -> None:
    job = admission._Job("", draw_sessions(Recipe(SHORT, 3)), 4.0, SMALL, COSTS, 0)
    for session in job.sessions():
        (turn,) = admission._within(100, session).turns
        Request(0, turn.prompt, SamplingParams(max_tokens=turn.output_len))
        assert max(turn.prompt) < 100
