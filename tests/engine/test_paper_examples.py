"""The examples of the PagedAttention paper (section 4.4, Fig. 8 and 9) and what sharing saves, in numbers."""

from __future__ import annotations

import random

import pytest

from quire.engine.core import EngineCore
from quire.engine.messages import Request, SamplingParams
from quire.engine.schedule.invariants import check_scheduler
from tests.engine.simulation import distinct_filled, make_core
from tests.engine.tables import Tables


def test_parallel_sampling_copies_the_last_block_on_the_first_write() -> None:
    """Fig. 8: seven prompt tokens at four to a block, two samples."""
    tables = Tables(16, 4)
    first, second = tables.group(list(range(7)), n=2)
    tables.write(first, [])
    tables.fork(first, second)
    seventh, first_block = first.table[1], first.table[0]
    assert tables.counts(first) == [2, 2]
    tables.step()

    tables.write(first, [100])  # the reference count of the last block goes from 2 to 1
    assert tables.counts(first) == [2, 1] and tables.counts(second) == [2, 1]
    assert first.table[1] != seventh and second.table[1] == seventh
    assert tables.blocks.moves.copies == {first.row: (seventh, first.table[1])}
    tables.write(second, [200])  # it is alone now: no copy
    assert second.table == [first_block, seventh]
    assert tables.blocks.copies_on_write == 1
    tables.step()

    tables.write(first, [101])  # both go on in blocks of their own
    tables.write(second, [201])
    assert tables.counts(first) == [2, 1, 1] and tables.counts(second) == [2, 1, 1]
    assert tables.blocks.pool.num_active == 5
    tables.leave(first)
    assert tables.counts(second) == [1, 1, 1]
    tables.leave(second)
    tables.step()
    assert tables.blocks.pool.num_free == 16


def test_beams_are_re_parented_by_reference_counts() -> None:
    """Fig. 9: four candidates that share a prompt; the next four all come of candidates 1 and 2."""
    tables = Tables(20, 1)  # at one token to a block, the figure's blocks are tokens
    beams = tables.group([0], n=4)
    tables.write(beams[0], [1])
    for beam in beams[1:3]:
        tables.fork(beams[0], beam)
    tables.write(beams[0], [3])
    tables.write(beams[1], [3])
    tables.write(beams[2], [4])
    tables.blocks.fork(beams[0], beams[3], 1)  # candidate 3 left the others after block 0
    tables.rows.context[beams[3].row] = 1
    tables.write(beams[3], [2, 2])
    tables.step()
    assert [tables.counts(beam) for beam in beams] == [[4, 3, 1], [4, 3, 1], [4, 3, 1], [4, 1, 1]]
    assert tables.blocks.pool.num_active == 7  # instead of 12
    dead = [beams[0].table[2], *beams[3].table[1:]]

    # Candidates 0 and 3 are not among the best any more: their blocks are free, and come of 1 and 2 again.
    for child, parent in ((beams[0], beams[1]), (beams[3], beams[2])):
        tables.follow(parent, child)
    assert [tables.counts(beam) for beam in beams] == [[4, 4, 2]] * 4
    assert all(tables.blocks.pool.count(block) == 0 for block in dead)
    for token, beam in enumerate(beams):
        tables.write(beam, [token])
    tables.step()
    assert [tables.counts(beam) for beam in beams] == [[4, 4, 2, 1]] * 4
    assert tables.blocks.pool.num_active == 2 + 2 + 4
    assert tables.blocks.copies_on_write == 0  # whole blocks are shared, never copied


def test_a_divergence_copies_at_most_one_block_a_beam() -> None:
    tables = Tables(64, 4)
    beams = tables.group(list(range(10)), n=4)
    tables.write(beams[0], [])
    for beam in beams[1:]:
        tables.fork(beams[0], beam)
    rng = random.Random(0)
    for length in range(11, 40):
        before = tables.blocks.copies_on_write
        if length > 11:
            tables.follow(*rng.sample(beams, 2))
        for token, beam in enumerate(beams):
            tables.write(beam, [token])
        assert tables.blocks.copies_on_write - before <= (3 if (length - 1) % 4 else 0)
        tables.step()
    assert tables.blocks.copies_on_write > 20


def run_to(core: EngineCore, context: int) -> None:
    """Step until every running row has `context` tokens in the cache."""
    while True:
        core.step()
        scheduler = core.scheduler
        rows = [sequence.row for group in scheduler.queue.running for sequence in group.live]
        if rows and (scheduler.rows.context[rows] == context).all():
            return


@pytest.mark.parametrize(
    ("prompt", "shared", "unshared"),
    [
        (64, 4 + 4 * 1, 4 * 5),  # 4 full blocks of prompt, and one block each for ten tokens
        (54, 3 + 4 * 1, 4 * 4),  # the prompt's last block is copied, but for one sample
        (256, 16 + 4 * 1, 4 * 17),
    ],
)
@pytest.mark.parametrize("beam_width", [0, 4])
def test_four_samples_share_the_prompt(prompt: int, shared: int, unshared: int, beam_width: int) -> None:
    core = make_core(100, 16, 4, 512, caching=False)
    params = SamplingParams(
        n=4, temperature=0.0 if beam_width else 1.0, beam_width=beam_width, max_tokens=20, ignore_eos=True
    )
    core.add(Request(0, [i % 50 for i in range(prompt)], params))
    run_to(core, prompt)
    pool = core.scheduler.blocks.pool
    # 64 tokens: 4 blocks, so 12 of the 16 that four prompts fill are saved; 256 tokens: 16 against 64.
    assert (pool.num_active, pool.num_active * 4) == {64: (4, 16), 54: (4, 16), 256: (16, 64)}[prompt]
    run_to(core, prompt + 10)
    if beam_width:
        assert pool.num_active <= shared  # beams share what they have generated too
    else:
        assert pool.num_active == shared
        assert pool.references == unshared
    check_scheduler(core.scheduler.queue)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("caching", [False, True])
def test_at_most_one_block_a_sequence_is_partly_filled(block_size: int, caching: bool) -> None:
    """Section 3.1: all that is wasted is in the last block of each sequence. The ratio served is exact."""
    rng = random.Random(block_size)
    core = make_core(4000 // block_size, block_size, 8, 32, caching=caching)
    for i in range(24):
        params = SamplingParams(
            n=rng.randint(1, 4), temperature=1.0, max_tokens=rng.randint(1, 60), ignore_eos=True
        )
        core.add(Request(i, [rng.randrange(50) for _ in range(rng.randint(1, 60))], params))
    wasted = []
    while core.has_work:
        core.step()
        stats = core.stats
        filled = distinct_filled(core)
        assert stats.tokens_filled == filled
        slots = stats.active_blocks * block_size
        assert slots - filled <= stats.running * (block_size - 1)
        wasted.append(slots - filled)
    assert (max(wasted) > 0) == (block_size > 1)
