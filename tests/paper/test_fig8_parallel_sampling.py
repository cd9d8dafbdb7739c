"""Fig. 8: two samples of one prompt share its blocks; the last one is copied on the first write."""

from __future__ import annotations

import pytest

from quire.engine.messages import Output, Request, SamplingParams
from tests.engine.oracle import expected_tokens
from tests.engine.simulation import make_core
from tests.paper.memory import Memory

PROMPT = "Four score and seven years ago our"


def test_fig8_parallel_sampling_copies_the_last_block_on_the_first_write() -> None:
    memory = Memory(9, next_blocks=[7, 1, 3])
    a1, a2 = memory.request(PROMPT, n=2)
    memory.tables.fork(a1, a2)
    memory.tables.step()
    assert memory.block_table(a1) == memory.block_table(a2) == [(7, 4), (1, 3)]
    assert memory.counts(a1) == [2, 2]

    # Sample A1 writes to its last block, which A2 names too: a new one, a copy, a reference less.
    memory.tables.write(a1, [1])
    assert memory.tables.blocks.moves.copies == {a1.row: (1, 3)}
    assert memory.block_table(a1) == [(7, 4), (3, 4)]
    assert memory.counts(a1) == memory.counts(a2) == [2, 1]
    # The reference count of physical block 1 is 1 now: A2 writes to it without a copy.
    memory.tables.write(a2, [2])
    assert memory.block_table(a2) == [(7, 4), (1, 4)]
    assert memory.tables.blocks.copies_on_write == 1
    memory.tables.step()

    memory.write(a1, "brought")  # both go on in blocks of their own
    memory.write(a2, "taught")
    assert memory.counts(a1) == memory.counts(a2) == [2, 1, 1]
    assert memory.pool.num_active == 5
    memory.tables.leave(a1)
    assert memory.counts(a2) == [1, 1, 1]
    memory.tables.leave(a2)
    memory.tables.step()
    assert memory.pool.num_free == 9


def test_fig8_content_of_the_blocks() -> None:
    memory = Memory(9, next_blocks=[7, 1, 3])
    a1, a2 = memory.request(PROMPT, n=2)
    memory.tables.fork(a1, a2)
    memory.tables.step()
    memory.write(a1, "fathers")
    memory.write(a2, "mothers")
    assert memory.physical_blocks() == {
        7: "Four score and seven",
        3: "years ago our fathers",
        1: "years ago our mothers",
    }


@pytest.mark.parametrize(("prompt", "copies"), [(7, 1), (8, 0)])
def test_fig8_as_the_scheduler_does_it(prompt: int, copies: int) -> None:
    """One copy for two samples, and none where the prompt fills its last block."""
    core = make_core(9, 4, 4, 64, caching=False)
    request = Request(0, list(range(prompt)), SamplingParams(n=2, max_tokens=5, ignore_eos=True))
    core.add(request)
    outputs: list[Output] = []
    planned = 0
    while core.has_work:
        outputs += core.step()
        planned += len(core.plan.copies) if core.plan is not None else 0
    assert planned == core.stats.copy_on_write == copies
    for sample in range(2):
        got = [token for output in outputs if output.index == sample for token in output.tokens]
        assert got == expected_tokens(request, sample)
