"""An interrupt where a step launches or waits loses nothing: the steps after it go on from there."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from quire.engine.messages import Output, Request
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.schedule.plan import StepPlan, StepResult
from tests.engine.oracle import OracleHandle, OracleRunner
from tests.engine.poison import Poisoned, PoisonedRunner
from tests.engine.simulation import check_outputs, make_core, random_request


class InterruptedHandle(OracleHandle):
    def __init__(self, handle: OracleHandle) -> None:
        super().__init__(handle.runner, handle.result, handle.arrive, handle.due)

    def wait(self) -> StepResult:
        assert isinstance(self.runner, InterruptedRunner)
        self.runner.may_interrupt("wait")
        return super().wait()


class InterruptedRunner(OracleRunner):
    """Raises KeyboardInterrupt now and then, where one may be raised; a launch that it ends did nothing."""

    rng: random.Random
    places: tuple[str, ...] = ()
    interrupts = 0
    refuses = False  # to compute, as what was to be computed before it was not

    def may_interrupt(self, place: str) -> None:
        if place in self.places and self.rng.random() < 0.2:
            self.interrupts += 1
            raise KeyboardInterrupt

    def launch(self, plan: StepPlan) -> OracleHandle:
        if self.refuses:
            raise RuntimeError("a step before this one has raised")
        self.refuses = True
        self.may_interrupt("launch")
        handle = InterruptedHandle(super().launch(plan))
        self.refuses = False
        return handle

    def settle(self) -> None:
        self.refuses = False


def interrupted_core(seed: int, *places: str, **how: Any) -> Any:
    core = make_core(40, 4, 6, 16, num_host_blocks=40, mode="auto", **how)
    core.runner = InterruptedRunner(40, 4, 6, 40)
    core.runner.rng = random.Random(seed)
    core.runner.places = places
    return core


def most_in_flight(core: Any) -> int:
    return len(core.scheduler.state.in_flight)


@pytest.mark.parametrize("pushed", [False, True])
@pytest.mark.parametrize("places", [("wait",), ("launch",), ("launch", "wait")])
def test_every_request_has_its_tokens_however_often_steps_are_interrupted(
    places: tuple[str, ...], pushed: bool
) -> None:
    """Whoever is preempted meanwhile, too."""
    interrupts = 0
    for seed in range(30):
        rng = random.Random(seed)
        preempting = random.Random(seed) if pushed else None
        core = interrupted_core(seed, *places, delays=random.Random(seed), pushed=preempting)
        requests = [random_request(rng, i, 12, 6) for i in range(8)]
        requests = [request for request in requests if not core.handle(request)]
        got: dict[tuple[int, int], list[Output]] = {}
        steps = 0
        while core.has_work:
            steps += 1
            assert steps < 5_000
            try:
                outputs = core.step()
            except KeyboardInterrupt:
                check_scheduler(core.scheduler.state)
                assert not core.torn
                assert most_in_flight(core) <= 2, "an interrupted step has others launched in vain"
                continue
            for output in outputs:
                got.setdefault((output.request_id, output.index), []).append(output)
            check_scheduler(core.scheduler.state)
        interrupts += core.runner.interrupts
        for request in requests:
            check_outputs(request, got, set(), Counter())
        assert core.scheduler.blocks.pool.num_available == 40
    assert interrupts >= 30


def test_who_is_tried_is_not_blamed_for_an_interrupt() -> None:
    """Neither are its steps counted, nor does our own request end the engine by one."""
    core = make_core(200, 4, 6, 16)
    runner = core.runner = PoisonedRunner(200, 4, 6, 0, random.Random(0))
    errors: list[BaseException] = [KeyboardInterrupt()] * 9 + [Poisoned("once")]

    def trouble(plan: StepPlan) -> Exception | None:
        if errors and (core.bisection.in_progress or len(errors) == 10):
            runner.failed = True
            raise errors.pop()
        return None

    runner.trouble = trouble
    requests = [random_request(random.Random(i), i, 12, 2) for i in range(4)]
    for request in requests:
        core.add(request)
    got: dict[tuple[int, int], list[Output]] = {}
    while core.has_work:
        try:
            outputs = core.step()
        except KeyboardInterrupt:
            continue
        for output in outputs:
            got.setdefault((output.request_id, output.index), []).append(output)
        check_scheduler(core.scheduler.state)
    assert not errors
    for request in requests:
        check_outputs(request, got, set(), Counter())


def test_what_is_aborted_after_an_interrupt_leaves_nothing() -> None:
    for seed in range(20):
        core = interrupted_core(seed, "wait", "launch")
        requests: list[Request] = [random_request(random.Random(seed + i), i, 12, 6) for i in range(8)]
        requests = [request for request in requests if not core.handle(request)]
        with pytest.raises(KeyboardInterrupt):
            while True:
                core.step()
        core.runner.places = ()
        for request in requests:
            core.abort(request.id)
        for _ in range(40):
            if core.has_work:
                assert not list(core.step())
        assert not core.has_work
        check_scheduler(core.scheduler.state)
        assert core.scheduler.blocks.pool.num_available == 40


def test_an_exception_that_is_raised_elsewhere_leaves_the_engine_torn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = interrupted_core(0)
    core.add(random_request(random.Random(1), 0, 12, 1))
    core.step()
    assert not core.torn

    def raises(now: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(core.bisection, "schedule", raises)
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert core.torn
