"""Fig. 3 and section 3.1: three kinds of waste where memory is reserved, and the one that paging leaves."""

from __future__ import annotations

import random

import pytest

from quire.engine.messages import Request, SamplingParams
from quire.loadtest.simulator.baselines import Reserved, Slots, Unreserved
from tests.engine.simulation import distinct_filled, make_core
from tests.paper.memory import tokens

# Request A: seven prompt tokens and three to come, at most 2048 in all. B: three and two, at most 512.
A = Request(0, tokens("Four score and seven years ago our"), SamplingParams(max_tokens=3, ignore_eos=True))
B = Request(1, tokens("You only live"), SamplingParams(max_tokens=2, ignore_eos=True))
ARENA = 4096


def test_fig3_reserved_internal_and_external_fragmentation() -> None:
    """Existing systems, at the iteration that computes "fathers" and "once"."""
    idle = make_core(1, 16, 1, 16).stats
    for_a, for_b = Reserved(ARENA, "max", 2048), Reserved(ARENA, "max", 512)
    for_b.arena = for_a.arena
    assert for_a.admit(A) and for_b.admit(B)
    assert for_a.slots(idle, context=7 + 1) == Slots(tokens=8, reserved=2, internal=2038)
    assert for_b.slots(idle, context=3 + 1) == Slots(tokens=4, reserved=1, internal=507)
    # External fragmentation: 1536 slots are free behind B, and no request of 1536 gets them in one piece.
    arena = for_a.arena
    assert arena.chunks == {0: 2048, 2048: 512}
    assert arena.size - arena.used == 1536
    assert arena.allocate(1536) is None and arena.allocate(1024) is not None


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_fig3_requests_on_pages(block_size: int) -> None:
    """Nothing is reserved, no piece is too small to be given, and less than a block of each is empty."""
    core = make_core(ARENA // block_size, block_size, 4, 64, caching=False)
    for request in (A, B):
        core.add(request)
    core.step()
    core.step()  # "fathers" and "once" are computed
    assert core.stats.tokens_filled == 8 + 4
    slots = Unreserved(block_size).slots(core.stats, context=12)
    assert slots == Slots(12, 0, {1: 0, 4: 0, 16: 8 + 12}[block_size])


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("caching", [False, True])
def test_section_3_1_at_most_one_block_a_sequence_is_partly_filled(block_size: int, caching: bool) -> None:
    """All that is wasted is in the last block of each sequence. The ratio served is exact."""
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
        assert slots - filled <= stats.sequences_running * (block_size - 1)
        wasted.append(slots - filled)
    assert (max(wasted) > 0) == (block_size > 1)
