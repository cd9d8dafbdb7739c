"""The interpreter looks for cycles seldom, and never through much, however long the engine has been busy."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from quire.engine import garbage
from quire.engine.messages import Request, SamplingParams
from tests.engine.simulation import make_core

ROWS = 8
FEW = 400  # objects, whatever there were requests


class Node:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def of_its_own() -> Iterator[None]:
    garbage.keep_what_is_there()
    yield
    gc.enable()


def test_cycles_are_found_in_an_engine_that_is_never_idle() -> None:
    nodes = [weakref.ref(Node()) for _ in range(garbage.BUSY_OBJECTS + 1000)]
    assert garbage.collect(garbage.BUSY_OBJECTS)
    assert not any(node() for node in nodes)


def test_it_looks_once_for_many_objects_and_not_again_at_what_is_in_use() -> None:
    looks, kept = 0, []
    for _ in range(3 * garbage.BUSY_OBJECTS):
        kept.append([])
        looks += garbage.collect(garbage.BUSY_OBJECTS)
    assert looks == 3
    assert len(gc.get_objects(0)) + len(gc.get_objects(1)) < garbage.BUSY_OBJECTS


@pytest.mark.parametrize("requests", [50, 400])
def test_the_first_look_after_a_busy_time_goes_through_little(requests: int) -> None:
    """As much after 400 requests as after 50, of an engine that was not idle between them."""
    core = make_core(60, 4, ROWS, 24)
    garbage.keep_what_is_there()
    params = SamplingParams(n=2, temperature=1.0, max_tokens=6, ignore_eos=True)
    added = steps = looks = 0
    while added < requests or core.has_work:
        while added < requests and len(core.scheduler.state.waiting) < 2:
            core.add(Request(added, [added % 50, 1, 2, 3, 4], params))
            added += 1
        core.step()
        steps += 1
        looks += garbage.collect(garbage.BUSY_OBJECTS)
    assert steps > requests and not looks
    assert len(gc.get_objects(0)) + len(gc.get_objects(1)) < FEW
