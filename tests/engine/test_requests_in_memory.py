"""The number of requests that the engine holds anything of, as its stats tell."""

from __future__ import annotations

import gc

from quire.engine.core import EngineCore
from quire.engine.messages import Request, SamplingParams
from tests.engine.simulation import make_core


def add(core: EngineCore, numbers: range) -> None:
    for number in numbers:
        core.add(Request(number, [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True)))


def finish(core: EngineCore) -> None:
    while core.has_work:
        core.step()
    gc.collect()


def test_requests_are_counted_until_nothing_holds_them() -> None:
    core = make_core(100, 4, 8, 64)
    assert core.stats.requests_in_memory == 0
    add(core, range(3))
    core.step()
    assert core.stats.requests_in_memory == 3
    kept = list(core.scheduler.state.alive)
    finish(core)
    add(core, range(3, 4))
    core.step()
    assert core.stats.requests_in_memory >= 4  # they have ended, and are held all the same
    del kept
    gc.collect()
    finish(core)
    add(core, range(4, 5))
    core.step()
    assert core.stats.requests_in_memory <= 2  # the newest, and one that a row may still name
