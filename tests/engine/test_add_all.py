"""Requests that are wanted together: the longest first, the same tokens, and sooner done."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.core import EngineCore
from quire.engine.messages import Request, SamplingParams
from quire.engine.schedule.invariants import check_scheduler
from quire.loadtest.offline import bench
from tests.engine.oracle import expected_tokens
from tests.engine.simulation import EOS, make_core

ROWS = 4


def small(num_blocks: int = 200) -> EngineCore:
    return make_core(num_blocks, 4, ROWS, budget=64)


def requests(lengths: list[int]) -> list[Request]:
    return [
        Request(i, [i % 7 + 5, i % 11], SamplingParams(max_tokens=length, ignore_eos=True, seed=i))
        for i, length in enumerate(lengths)
    ]


def run(core: EngineCore) -> tuple[dict[int, list[int]], int]:
    """The tokens of each request, and the steps that all took."""
    tokens: dict[int, list[int]] = {}
    steps = 0
    while core.has_work:
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
        steps += 1
    return tokens, steps


@given(st.lists(st.integers(1, 12), max_size=12))
def test_longest_first_and_equal_ones_in_order(lengths: list[int]) -> None:
    core = small()
    core.add_all(requests(lengths))
    waiting = [group.request.id for group in core.scheduler.state.waiting]
    assert waiting == sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    tokens, _ = run(core)
    assert tokens == {request.id: expected_tokens(request, 0, EOS) for request in requests(lengths)}


def test_nobody_is_left_to_run_on_alone() -> None:
    lengths = [4] * 8 + [20]
    together, in_order = small(), small()
    together.add_all(requests(lengths))
    for request in requests(lengths):
        in_order.add(request)
    (tokens, steps), (same_tokens, more_steps) = run(together), run(in_order)
    assert tokens == same_tokens
    assert (
        more_steps - steps == 2 * 4 + 2
    )  # the long one waits for two short ones, and a step for each to end


def test_a_bench_in_order_is_in_order() -> None:
    core = small()
    bench.queue(core, requests([2, 5, 3]), in_order=True)
    assert [group.request.id for group in core.scheduler.state.waiting] == [0, 1, 2]


def test_none_is_queued_if_the_last_can_never_run() -> None:
    """Nor is one that waits for its grammar."""
    core = small(num_blocks=3)
    assert core.grammars is not None
    new = Request(8, [1, 2], SamplingParams(max_tokens=5, grammar="not compiled yet"))
    long = Request(9, [1] * 17, SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="needs up to 5 KV blocks"):
        core.add_all([long, *requests([2, 3, 4]), new])
    assert not core.has_work
    check_scheduler(core.scheduler.state)
