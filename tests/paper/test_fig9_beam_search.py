"""Fig. 9: four beam candidates, whose sharing changes with every step of the search."""

from __future__ import annotations

import random

from quire.engine.messages import Output, Request, SamplingParams
from tests.engine.oracle import expected_beams
from tests.engine.simulation import make_core
from tests.engine.tables import Tables
from tests.paper.memory import BLOCK_SIZE


def test_fig9_candidates_are_re_parented_by_reference_counts() -> None:
    tables = Tables(13, BLOCK_SIZE)
    beams = tables.group([0] * BLOCK_SIZE, n=4)
    # Before the dotted line: all share the prompt, candidate 3 digresses from the second block on, and
    # candidates 0 to 2 share the first three blocks and diverge at the fourth.
    tables.write(beams[0], [])
    tables.fork(beams[0], beams[3])
    for level in range(2):
        tables.write(beams[0], [10 + level] * BLOCK_SIZE)
        tables.write(beams[3], [20 + level] * BLOCK_SIZE)
    for beam in beams[1:3]:
        tables.fork(beams[0], beam)
    for token, beam in enumerate(beams):
        tables.write(beam, [30 + token] * BLOCK_SIZE)
    tables.step()
    assert [beam.table for beam in beams] == [[0, 1, 3, 5], [0, 1, 3, 6], [0, 1, 3, 7], [0, 2, 4, 8]]
    assert [tables.counts(beam) for beam in beams] == [[4, 3, 3, 1]] * 3 + [[4, 1, 1, 1]]
    assert tables.blocks.pool.num_active == 9  # instead of 16

    # The best four all come of candidates 1 and 2. Blocks 2, 4, 5 and 8 have no reference left: they are
    # free.
    free = tables.blocks.pool.num_free
    for child, parent in ((beams[0], beams[1]), (beams[3], beams[2])):
        tables.follow(parent, child)
    assert [beam.table for beam in beams] == [[0, 1, 3, 6], [0, 1, 3, 6], [0, 1, 3, 7], [0, 1, 3, 7]]
    assert [block for block in range(9) if not tables.blocks.pool.count(block)] == [2, 4, 5, 8]
    assert tables.blocks.pool.num_free == free + 4

    # Each takes a block for its new tokens. The figure numbers them 9 to 12; here they are those just freed.
    for token, beam in enumerate(beams):
        tables.write(beam, [40 + token])
    tables.step()
    assert [tables.counts(beam) for beam in beams] == [[4, 4, 4, 2, 1]] * 4
    assert {beam.table[-1] for beam in beams} == {2, 4, 5, 8}
    assert tables.blocks.copies_on_write == 0  # whole blocks are shared, never copied


def test_fig9_a_divergence_copies_at_most_one_block_a_beam() -> None:
    """Section 4.4: earlier systems copy the whole KV cache of a candidate that another one goes on from."""
    tables = Tables(64, BLOCK_SIZE)
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


def test_fig9_as_the_scheduler_does_it() -> None:
    """A search of four beams returns what it would without paging, in fewer blocks than its tables name."""
    core = make_core(40, BLOCK_SIZE, 4, 64, caching=False)
    params = SamplingParams(n=4, temperature=0.0, beam_width=4, max_tokens=20, ignore_eos=True)
    request = Request(0, list(range(BLOCK_SIZE)), params)
    core.add(request)
    outputs: list[Output] = []
    shared = []
    while core.has_work:
        outputs += core.step()
        shared.append(core.stats.block_references - core.stats.active_blocks)
    assert [output.tokens for output in outputs] == expected_beams(request)
    assert max(shared) > 3  # three references to the prompt's block, and more to generated ones
    assert core.stats.free_blocks == 40
