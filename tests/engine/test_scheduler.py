"""The scheduler and block manager against the oracle model: every token right under any schedule."""

from __future__ import annotations

from collections import Counter

import pytest

from quire.engine.core import EngineCore
from quire.engine.messages import EndSample, Output, Request, SamplingParams
from tests.engine.nightly import NIGHTLY
from tests.engine.oracle import expected_tokens
from tests.engine.simulation import EOS, make_core, simulate

# Seeds of a chunk: `make test` has so many that each thing comes about. Those that tell mutants are in
# test_mutants.py, whatever these are.
SEEDS = 3000 if NIGHTLY else 200
CHUNKS, PUSHED_CHUNKS = (7, 2) if NIGHTLY else (1, 1)


def test_nobody_waits_for_a_transfer_of_no_blocks() -> None:
    """A group comes back from host memory whose blocks are all findable on the device."""
    simulate(2651)


def test_a_sample_that_is_whole_gives_its_place_back_and_the_others_go_on() -> None:
    core = make_core(num_blocks=16, block_size=4, max_num_seqs=4, budget=16)
    params = SamplingParams(n=2, max_tokens=12, temperature=1.0, ignore_eos=True, seed=1)
    request = Request(0, [1, 2, 3], params)
    core.add(request)
    rows, got = core.scheduler.rows, _first_outputs(core)
    assert rows.num_used == 2
    core.handle(EndSample(0, 1))
    assert rows.num_used == 1
    core.handle(EndSample(0, 1))  # what has ended is left alone, and what is not there
    core.handle(EndSample(7, 0))
    tokens = [token for output in got if output.index == 0 for token in output.tokens]
    while core.has_work:
        for output in core.step():
            assert output.index == 0
            tokens += output.tokens
    assert tokens == expected_tokens(request, 0, EOS)
    core.add(Request(1, [1, 2, 3], params))
    _first_outputs(core)
    for index in range(2):
        core.handle(EndSample(1, index))
    assert 1 not in core.scheduler.state.groups and rows.num_used == 0
    assert core.scheduler.state.records[-1].reason == "stop"


def _first_outputs(core: EngineCore) -> list[Output]:
    outputs = list(core.step())
    while not outputs:
        outputs = list(core.step())
    return outputs


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_request_gets_its_tokens_under_any_schedule(chunk: int) -> None:
    done: Counter[str] = Counter()
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        try:
            done += simulate(seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
    reached = [
        "recomputes",
        "swaps",
        "copies",
        "cached",
        "from host",
        "evictions",
        "searches",
        "pinned",
        "constrained",
        "computing",
        "tails",
        "stopped",
    ]
    assert min(done[name] for name in reached) > 10, f"the runs no longer reach what they are for: {done}"


@pytest.mark.parametrize("chunk", range(PUSHED_CHUNKS))
def test_tokens_are_right_whenever_anyone_yields(chunk: int) -> None:
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        try:
            simulate(seed, pushed=True)
        except AssertionError as error:
            error.add_note(f"seed {seed}, pushed")
            raise
