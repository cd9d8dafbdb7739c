"""A request that has ended is gone: reference counts free all that was its own, no collector has to."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from quire.engine.config import PreemptionMode
from quire.engine.core import EngineCore
from quire.engine.messages import Request, SamplingParams, StepOutputs
from quire.engine.schedule.draft import InFlightStep
from quire.engine.sequences.beam_search import BeamSearch
from quire.engine.sequences.grammar import Constraint
from quire.engine.sequences.sequence import BeamGroup, Sequence, SequenceGroup
from tests.engine.poison import KINDS, PoisonedRunner, poisoned
from tests.engine.simulation import make_core, random_request
from tests.engine.toy_grammar import GRAMMARS

KINDS_OF_A_REQUEST = (SequenceGroup, Sequence, Request, BeamGroup, BeamSearch, Constraint, InFlightStep)
REQUESTS = 60
BLOCKS, BLOCK_SIZE, ROWS = 60, 4, 8


def living() -> Counter[str]:
    """Count the objects of each kind whose beginning `uncollected` has seen."""
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in KINDS_OF_A_REQUEST)


@contextmanager
def uncollected() -> Iterator[None]:
    """Without a collector, which must find nothing afterwards. What there was before does not count."""
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
        assert gc.collect() == 0, "something waits for a collector"
    finally:
        gc.enable()


def some_core(mode: PreemptionMode = "recompute", num_host_blocks: int = 0, **how: Any) -> EngineCore:
    return make_core(
        BLOCKS,
        BLOCK_SIZE,
        ROWS,
        24,
        num_host_blocks=num_host_blocks,
        mode=mode,
        pushed=how.pop("pushed", None),
    )


def some_request(rng: random.Random, request_id: int) -> Request:
    """One of all kinds: samples, beams, grammars, log-probabilities, shared prompts."""
    request = random_request(rng, request_id, 12, 4)
    if request_id % 5 == 4:
        grammar = replace(SamplingParams(max_tokens=9, min_tokens=2), grammar=rng.choice(GRAMMARS))
        request = replace(request, params=grammar)
    return request


def endings(outputs: StepOutputs) -> list[int]:
    """Return the request of each sequence that ends by them."""
    return [output.request_id for output in outputs if output.finish_reason is not None]


def run_to_its_end(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def test_lone_requests_leave_nothing() -> None:
    core, rng = some_core(), random.Random(0)
    with uncollected():
        for i in range(REQUESTS):
            core.add(some_request(rng, i))
            run_to_its_end(core)
            assert not living(), f"request {i} is still there"


def test_batches_that_end_at_once_leave_nothing() -> None:
    core = some_core()
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with uncollected():
        for batch in range(10):
            for i in range(ROWS):
                core.add(Request(batch * ROWS + i, [i, batch, 1, 2], params))
            run_to_its_end(core)
            assert not living(), f"batch {batch} is still there"


@pytest.mark.parametrize("aborts", [0.0, 0.1])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_an_engine_that_is_never_idle_holds_only_what_is_unfinished(
    mode: PreemptionMode, aborts: float
) -> None:
    """What has ended in the step just committed may be named by the one in flight, and by no later one."""
    rng = random.Random(1)
    core = some_core(mode, BLOCKS if mode == "swap" else 0, pushed=random.Random(2))
    added, unfinished, most = 0, {}, 0
    with uncollected():
        ended_before: set[int] = set()
        while added < 3 * REQUESTS or unfinished:
            while len(unfinished) < 6 and added < 3 * REQUESTS:
                request = some_request(rng, added)
                if not core.handle(request):
                    unfinished[request.id] = request.params.n
                del request
                added += 1
            ended: set[int] = set()
            if unfinished and rng.random() < aborts:
                left = rng.choice(list(unfinished))
                core.abort(left)
                ended.add(left)
                del unfinished[left]
            for request_id in endings(core.step()):
                if request_id in unfinished:
                    unfinished[request_id] -= 1
                    if not unfinished[request_id]:
                        del unfinished[request_id]
                        ended.add(request_id)
            most = max(most, len(unfinished))
            groups = living()["SequenceGroup"]
            assert groups <= len(unfinished) + len(ended | ended_before), "who has ended stays"
            ended_before = ended
        run_to_its_end(core)
        assert not living()
    preemption = core.scheduler.preemption
    assert most == 6 and preemption.swaps + preemption.recomputes > 20
    assert mode == "recompute" or preemption.swaps > 5


@pytest.mark.parametrize("moment", ["waiting", "running", "constrained", "swapped"])
def test_who_leaves_is_gone_two_steps_later(moment: str) -> None:
    core = some_core("swap", BLOCKS)
    params = SamplingParams(n=2, max_tokens=40, ignore_eos=True)
    if moment == "constrained":
        params = SamplingParams(n=2, max_tokens=40, grammar=GRAMMARS[4])
    with uncollected():
        for i in range(8 if moment == "swapped" else 1):
            core.add(Request(i, [1, 2, 3, 4, 5 + i], params))
        for _ in range(0 if moment == "waiting" else 6):
            core.step()
        while moment == "swapped" and not core.scheduler.state.num_swapped:
            core.step()
        for i in range(8):
            core.abort(i)
        core.step()
        core.step()
        left = living()
        assert not left["SequenceGroup"] and not left["Sequence"], f"still there: {left}"
        run_to_its_end(core)
        assert not living()


@pytest.mark.parametrize("kind", KINDS[:3])
def test_who_makes_steps_raise_leaves_nothing(kind: Any) -> None:
    core, rng = some_core(), random.Random(3)
    core.runner = PoisonedRunner(BLOCKS, BLOCK_SIZE, ROWS, 0, rng)
    with uncollected():
        for i in range(12):
            request = some_request(rng, i)
            core.add(poisoned(request, kind, len(request.prompt)) if i % 4 == 1 else request)
            del request
        run_to_its_end(core)
        left = living()
        assert not left, f"still there: {left}"
    assert core.runner.raised


def test_a_grammar_that_is_refused_takes_its_request_along() -> None:
    core = some_core()
    with uncollected():
        core.add(Request(0, [1, 2], SamplingParams(grammar="no grammar at all")))
        errors = []
        while core.has_work:
            errors += [output.error for output in core.step()]
        assert not living()
        assert len(errors) == 1 and errors[0]
