"""The lesson's examples of sharing: four samples or beams of a prompt, in blocks of 16."""

from __future__ import annotations

import pytest

from quire.engine.core import EngineCore
from quire.engine.messages import Request, SamplingParams
from quire.engine.schedule.invariants import check_scheduler
from tests.engine.simulation import make_core

BLOCK_SIZE = 16


def start(prompt: int, beam_width: int, max_tokens: int = 20) -> EngineCore:
    """Four samples, or a search of four beams, of a prompt of so many tokens."""
    core = make_core(100, BLOCK_SIZE, 4, 512, caching=False)
    temperature = 0.0 if beam_width else 1.0
    params = SamplingParams(
        n=4, temperature=temperature, beam_width=beam_width, max_tokens=max_tokens, ignore_eos=True
    )
    core.add(Request(0, [i % 50 for i in range(prompt)], params))
    return core


def run_to(core: EngineCore, context: int) -> None:
    """Step until every running row has `context` tokens in the cache."""
    while True:
        core.step()
        rows = core.scheduler.rows
        used = [sequence.row for sequence in rows.sequences if sequence is not None]
        if used and (rows.context[used] == context).all():
            return


@pytest.mark.parametrize("beam_width", [0, 4])
def test_lesson_a_prompt_of_256_tokens_16_blocks_against_64(beam_width: int) -> None:
    core = start(256, beam_width)
    run_to(core, 256)
    pool = core.scheduler.blocks.pool
    assert (pool.num_active, 4 * -(-256 // BLOCK_SIZE)) == (16, 64)
    run_to(core, 256 + 10)
    if beam_width:
        assert pool.num_active <= 16 + 4 * 1  # beams share what they have generated, too
    else:
        assert (pool.num_active, pool.references) == (16 + 4 * 1, 4 * 17)


def test_lesson_beams_12_blocks_against_16() -> None:
    """The lesson counts 4 blocks of a shared prompt of 64 tokens and 2 for each of four beams, 12, beside 16.

    Ten tokens of a beam take one block, not two: the prompt fills its four blocks, so the first token of a
    beam begins a block and the sixteenth ends it. That makes 4 + 4 × 1 = 8. The second block of each comes
    with its seventeenth token, and only then there are 4 + 4 × 2 = 12. They are four samples here, which
    share the prompt alone: beams share what they have generated as well, and need no more.
    """
    core = start(64, 0, max_tokens=40)
    pool = core.scheduler.blocks.pool
    run_to(core, 64)
    assert (pool.num_active, pool.num_active * 4) == (4, 16)  # four prompts without sharing are 16 blocks
    for generated, shared, apart in [(1, 8, 20), (10, 8, 20), (16, 8, 20), (17, 12, 24), (32, 12, 24)]:
        run_to(core, 64 + generated)
        assert (pool.num_active, pool.references) == (shared, apart)


@pytest.mark.parametrize(("generated", "most"), [(10, 8), (16, 8), (17, 12)])
def test_lesson_beams_need_no_more_than_samples(generated: int, most: int) -> None:
    core = start(64, 4, max_tokens=40)
    run_to(core, 64 + generated)
    assert 4 < core.scheduler.blocks.pool.num_active <= most
    check_scheduler(core.scheduler.state)


@pytest.mark.parametrize("beam_width", [0, 4])
def test_lesson_a_prompt_that_does_not_fill_its_last_block(beam_width: int) -> None:
    """54 tokens: the last block of the prompt is copied for all samples but one."""
    core = start(54, beam_width)
    pool = core.scheduler.blocks.pool
    run_to(core, 54)
    assert pool.num_active == 4
    run_to(core, 54 + 10)
    if beam_width:
        assert pool.num_active <= 3 + 4 * 1
    else:
        assert (pool.num_active, pool.references) == (3 + 4 * 1, 4 * 4)
        assert core.scheduler.blocks.copies_on_write == 3
