"""A newer request makes room for an older one, and goes on later as if nothing had happened (section 4.5)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.engine.config import PreemptionMode
from quire.engine.core import EngineCore
from quire.engine.messages import Request, SamplingParams
from tests.engine.oracle import expected_tokens
from tests.engine.simulation import make_core

PROMPT = [1, 2, 3, 4]
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, seed=7)


def step_until(core: EngineCore, reached: Callable[[], bool], tokens: dict[int, list[int]]) -> None:
    while not reached():
        assert core.has_work
        for output in core.step():
            tokens[output.request_id] += output.tokens


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_newer_request_is_preempted_and_resumed(mode: PreemptionMode) -> None:
    # Each request comes to four blocks. There are six: both begin, but do not end side by side.
    core = make_core(6, 4, 2, 64, caching=False, num_host_blocks=6, mode=mode)
    state, preemption = core.scheduler.state, core.scheduler.preemption
    older, newer = Request(0, PROMPT, PARAMS), Request(1, PROMPT, PARAMS)
    core.add(older)
    core.add(newer)
    tokens: dict[int, list[int]] = {0: [], 1: []}

    step_until(core, lambda: len(state.running) == 2, tokens)

    # Preempted: the newer one has neither row nor device blocks, but all its tokens.
    step_until(core, lambda: preemption.recomputes + preemption.swaps > 0, tokens)
    assert [group.request for group in state.running] == [older]
    assert [group.request for group in state.waiting] == [newer]
    (sequence,) = state.waiting[0].live
    assert sequence.table == [] and 0 < len(tokens[1]) < 12
    assert sequence.tokens.tolist() == PROMPT + tokens[1]
    assert (sequence.host_table != []) == (mode == "swap")

    # Resumed: it goes on from the tokens that it had.
    step_until(core, lambda: [group.request for group in state.running] == [newer], tokens)
    assert tokens[0] == expected_tokens(older, 0)

    step_until(core, lambda: not core.has_work, tokens)
    assert tokens == {0: expected_tokens(older, 0), 1: expected_tokens(newer, 0)}
    assert (preemption.recomputes, preemption.swaps) == ((1, 0) if mode == "recompute" else (0, 1))
