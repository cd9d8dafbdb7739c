"""The guarantees of the scheduler when memory is short: no thrashing, no leak, a line about each victim.

That the newest group is preempted, the oldest never, that nothing new comes in while a group is swapped out
and that everyone ends within a bound is asserted in every run of the simulation.
"""

from __future__ import annotations

import logging
import random
import re
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from quire.engine.config import EngineConfig, PreemptionMode
from quire.engine.core import EngineCore
from quire.engine.messages import Request, SamplingParams
from quire.engine.schedule.draft import Prefill, StepDraft
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.startup import start_engine
from tests.engine.oracle import expected_tokens
from tests.engine.simulation import make_core

BLOCK_SIZE = 4
MODES: list[PreemptionMode] = ["swap", "recompute"]


def pressed_core(
    lengths: list[int], fits: float, mode: PreemptionMode, n: int = 1
) -> tuple[EngineCore, list[Request]]:
    """Requests of `lengths` tokens after 8 of prompt, and room for `fits` of them all at their longest."""
    needed = int(fits * n * sum(-(-(8 + length) // BLOCK_SIZE) for length in lengths))
    core = make_core(needed, BLOCK_SIZE, 32, 64, caching=False, num_host_blocks=needed, mode=mode)
    requests = []
    for i, length in enumerate(lengths):
        params = SamplingParams(n=n, max_tokens=length, temperature=1.0, ignore_eos=True, seed=i)
        requests.append(Request(i, [i] * 8, params))
        core.add(requests[-1])
    return core, requests


def run(core: EngineCore) -> dict[tuple[int, int], list[int]]:
    """Step until nothing is left; the tokens of each sequence."""
    got: dict[tuple[int, int], list[int]] = {}
    while core.has_work:
        for output in core.step():
            got.setdefault((output.request_id, output.index), []).extend(output.tokens)
    check_scheduler(core.scheduler.state)
    return got


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("uneven", [False, True])
def test_preemptions_do_not_grow_with_the_output(mode: PreemptionMode, uneven: bool) -> None:
    """N groups that hardly fit are preempted N times at first at most, once more each time one comes back.

    A group comes back only when all its blocks and one for each running sequence are there. Running groups
    only take blocks, and one preempted for another leaves less than it needs itself: so after one has
    been, nobody comes back until a group has ended. N ends bring back N groups where each leaves room for
    one: 2 N preemptions, whatever the length. Were they let in with room for less, there would be one for
    each block that the others generate.
    """
    groups = 6
    for max_tokens in (24, 96, 240):
        rng = random.Random(max_tokens)
        lengths = [rng.randint(max_tokens // 2, max_tokens) if uneven else max_tokens for _ in range(groups)]
        core, _ = pressed_core(lengths, 0.7, mode)
        run(core)
        preemptions = core.scheduler.preemption.recomputes + core.scheduler.preemption.swaps
        assert 0 < preemptions <= 2 * groups


def under_way(core: EngineCore) -> list[int]:
    scheduler = core.scheduler
    return [g.request.id for g in [*scheduler.state.running, *scheduler.state.waiting] if g.transferring]


LEAVING = [10 + 3 * (i % 4) for i in range(12)]


@pytest.mark.parametrize("everyone", [False, True])
def test_a_client_that_leaves_in_the_middle_of_a_swap_leaks_nothing(everyone: bool) -> None:
    """One run for each step at which blocks of a group are under way; there it is aborted, or all are."""
    core, _ = pressed_core(LEAVING, 0.3, "swap", n=2)
    moments = []
    step = 0
    while core.has_work:
        core.step()
        step += 1
        if under_way(core):
            moments.append(step)
    assert len(moments) >= 10
    for moment in moments:
        core, requests = pressed_core(LEAVING, 0.3, "swap", n=2)
        got: dict[tuple[int, int], list[int]] = {}
        for _ in range(moment):
            for output in core.step():
                got.setdefault((output.request_id, output.index), []).extend(output.tokens)
        leaving = set(range(len(LEAVING)) if everyone else under_way(core))
        for request_id in leaving:
            core.abort(request_id)
        check_scheduler(core.scheduler.state)
        pools = [core.scheduler.blocks.pool, core.scheduler.blocks.host.pool]
        if everyone:
            core.step()
            core.step()
            assert [pool.num_free for pool in pools] == [pool.num_blocks for pool in pools]
        for key, tokens in run(core).items():
            assert key[0] not in leaving
            got.setdefault(key, []).extend(tokens)
        assert [pool.num_free for pool in pools] == [pool.num_blocks for pool in pools]
        for request in requests:
            for index in range(2):
                if request.id not in leaving:
                    assert got[request.id, index] == expected_tokens(request, index)


def test_a_group_that_this_step_writes_for_is_not_swapped_out() -> None:
    """Its tokens are not in the blocks before the step is done, and the copy out reads them before that."""
    core, _ = pressed_core([8, 8], 2.0, "swap")
    for _ in range(3):
        core.step()
    older, newer = core.scheduler.state.running
    (sequence,) = newer.live
    draft = StepDraft(prefills=[Prefill(sequence, 0, 4, [], sequence.row)])
    core.scheduler.preemption.preempt_newest(draft, older.live[0])
    assert not newer.swapped and core.scheduler.preemption.recomputes == 1


def test_nothing_is_published_before_its_step_is_committed() -> None:
    """A step that fails leaves nothing behind that others could hear of."""
    core = make_core(8, BLOCK_SIZE, 2, 32)
    core.add(Request(0, [1, 2, 3, 4, 5, 6, 7, 8, 9], SamplingParams(max_tokens=2, ignore_eos=True)))
    scheduler = core.scheduler
    plan = scheduler.schedule()
    assert plan is not None and plan.num_tokens == 9
    assert len(scheduler.blocks.cache) == 0
    scheduler.commit(core.runner.launch(plan).wait())
    assert len(scheduler.blocks.cache) == 2


def test_preemption_is_logged_with_who_for_whom_and_what_it_cost(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "quire.scheduler"):
        for mode in MODES:
            core, _ = pressed_core([20] * 5, 0.6, mode)
            run(core)
    line = re.compile(r"preempted request=(\d+) for=(\d+) mode=(swap|recompute) blocks=(\d+) tokens=(\d+)")
    matches = [line.fullmatch(record.getMessage()) for record in caplog.records]
    assert matches
    seen = set()
    for match in matches:
        assert match is not None
        victim, beneficiary, blocks, tokens = (int(match[i]) for i in (1, 2, 4, 5))
        assert victim >= beneficiary and victim > 0
        assert 0 < tokens <= blocks * BLOCK_SIZE
        seen.add(match[3])
    assert seen == set(MODES)


def test_host_blocks_never_exceed_device_blocks(llama: tuple[Path, LlamaForCausalLM]) -> None:
    config = EngineConfig(
        model=str(llama[0]),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=10,
        swap_space=1,
    )
    core, info = start_engine(config)[:2]
    assert info.num_host_blocks == core.scheduler.blocks.host.pool.num_blocks == info.num_blocks == 10
