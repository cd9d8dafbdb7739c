"""Fig. 6 and section 4.3: the blocks of one request while it grows."""

from __future__ import annotations

from quire.engine.messages import Request, SamplingParams
from tests.engine.simulation import make_core
from tests.paper.memory import Memory

PROMPT = "Four score and seven years ago our"


def test_fig6_block_table_translation() -> None:
    memory = Memory(9, next_blocks=[7, 1, 3])
    # ① Seven prompt tokens take the first two logical blocks. The slot that is left is for the next token.
    (a,) = memory.request(PROMPT)
    assert memory.block_table(a) == [(7, 4), (1, 3)]
    # ② "fathers" goes into the slot: only the number of filled slots changes.
    memory.write(a, "fathers")
    assert memory.block_table(a) == [(7, 4), (1, 4)]
    # ③ The last logical block is full: "brought" takes a new physical one.
    memory.write(a, "brought")
    assert memory.block_table(a) == [(7, 4), (1, 4), (3, 1)]
    assert memory.physical_blocks() == {7: "Four score and seven", 1: "years ago our fathers", 3: "brought"}


def test_fig6_as_the_scheduler_does_it() -> None:
    """Memory is given out for what a step computes, never for the most that a request may grow to."""
    core = make_core(9, 4, 4, 64, caching=False)
    core.add(Request(0, list(range(7)), SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)))
    taken = []
    while core.has_work:
        core.step()
        if core.plan is not None:
            taken.append((int(core.plan.context_lens[0]), len(core.plan.table_blocks)))
    assert taken == [(7, 2), (8, 0), *((context, int(context % 4 == 1)) for context in range(9, 21))]
    assert core.stats.free_blocks == 9
