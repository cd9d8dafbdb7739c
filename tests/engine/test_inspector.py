"""What is told of the engine's blocks: states, tables, moves, texts; tokens only to their owner."""

from __future__ import annotations

import numpy as np

from quire.engine.core import EngineCore
from quire.engine.inspection.inspector import Inspector
from quire.engine.inspection.messages import (
    NO_MOVES,
    STATES,
    BlockAnswer,
    BlockQuestion,
    OwnAnswer,
    OwnQuestion,
    PoolAnswer,
    PoolQuestion,
    PrefixAnswer,
    PrefixQuestion,
)
from quire.engine.inspection.own_blocks import OwnBlocks
from quire.engine.inspection.replay import read_moves
from quire.engine.memory.move_kinds import ALLOCATE, EVICT, HIT, KEEP, NOBODY, STEP, SWAP_IN, SWAP_OUT
from quire.engine.messages import Request, SamplingParams
from tests.engine.simulation import make_core

PROMPT = list(range(10, 22))  # three blocks of 4


def pool(inspector: Inspector) -> PoolAnswer:
    answer = inspector.answer(PoolQuestion())
    assert isinstance(answer, PoolAnswer)
    return answer


def moves(answer: PoolAnswer) -> list[tuple[int, int]]:
    """Return the kinds of moves, and whose they are."""
    return [(move.kind, move.request) for move in read_moves(answer.moves) if move.kind != STEP]


def block(inspector: Inspector, number: int, tenant: str = "") -> BlockAnswer:
    answer = inspector.answer(BlockQuestion(number, "device", tenant))
    assert isinstance(answer, BlockAnswer)
    return answer


def texts(inspector: Inspector) -> PrefixAnswer:
    answer = inspector.answer(PrefixQuestion())
    assert isinstance(answer, PrefixAnswer)
    return answer


def states(answer: PoolAnswer) -> list[str]:
    return [STATES[number] for number in answer.states]


def numbers(blocks: bytes) -> list[int]:
    return [int(each) for each in np.frombuffer(blocks, np.int32)]


def step(core: EngineCore, inspector: Inspector, count: int = 1) -> None:
    for _ in range(count):
        core.step()
        inspector.observe()


def finish(core: EngineCore, inspector: Inspector) -> None:
    while core.has_work:
        step(core, inspector)


def request(number: int, n: int = 1, tokens: int = 4, salt: str = "") -> Request:
    params = SamplingParams(n=n, max_tokens=tokens, ignore_eos=True, seed=1)
    return Request(number, PROMPT, params, cache_salt=salt)


def test_samples_are_seen_to_share_their_prompt() -> None:
    core = make_core(16, 4, 8, 64)
    inspector = Inspector(core)
    core.add(request(7, n=2))
    step(core, inspector, 3)
    seen = pool(inspector)
    first, second = (numbers(table.blocks) for table in seen.tables)
    assert first[:3] == second[:3] and first[3] != second[3]
    assert [(table.request, table.index, table.state) for table in seen.tables] == [
        (7, 0, "running"),
        (7, 1, "running"),
    ]
    assert [seen.references[each] for each in first] == [2, 2, 2, 1]
    assert states(seen).count("active") == 5
    assert (ALLOCATE, 7) in moves(seen) and (KEEP, NOBODY) in moves(seen)  # nobody had asked before
    held = block(inspector, first[0])
    assert [(each.index, each.logical) for each in held.holders] == [(0, 0), (1, 0)]


def test_a_hit_and_an_eviction_are_moves() -> None:
    core = make_core(5, 4, 8, 64)
    inspector = Inspector(core)
    pool(inspector)
    core.add(request(1))
    finish(core, inspector)
    assert states(pool(inspector)).count("cached") == 3
    core.add(request(2))
    finish(core, inspector)
    assert (HIT, 2) in moves(pool(inspector))
    assert texts(inspector).hits >= 2
    core.add(Request(3, [5] * 16, SamplingParams(max_tokens=2, ignore_eos=True, seed=1)))
    finish(core, inspector)
    assert (EVICT, NOBODY) in moves(pool(inspector))
    assert texts(inspector).evictions > 0


def test_swapped_requests_keep_their_host_blocks_in_sight() -> None:
    core = make_core(8, 4, 8, 64, num_host_blocks=8, mode="swap")
    inspector = Inspector(core)
    pool(inspector)
    for number in (1, 2):
        core.add(Request(number, [number] * 10, SamplingParams(max_tokens=16, ignore_eos=True, seed=1)))
    kinds, seen = set(), set()
    while core.has_work:
        step(core, inspector)
        answer = pool(inspector)
        kinds |= {kind for kind, _ in moves(answer)}
        seen |= {table.state for table in answer.tables if table.host_blocks}
    assert {SWAP_OUT, SWAP_IN} <= kinds and "swapped" in seen


def test_tokens_are_their_owners_and_others_get_a_digest() -> None:
    core = make_core(16, 4, 8, 64)
    inspector = Inspector(core)
    core.add(request(1, salt="mine-and-more"))
    step(core, inspector, 2)
    (table,) = pool(inspector).tables
    running = numbers(table.blocks)
    mine, others = block(inspector, running[0], "mine"), block(inspector, running[0], "yours")
    assert (mine.tokens, others.tokens) == (PROMPT[:4], None) and mine.digest == others.digest != ""
    finish(core, inspector)
    cached, hidden = block(inspector, running[1], "mine"), block(inspector, running[1], "yours")
    assert STATES[cached.state] == "cached" and cached.position == 4
    assert (cached.tokens, hidden.tokens) == (PROMPT[4:8], None)
    assert block(inspector, 99).holders == []


def test_texts_branch_where_they_differ() -> None:
    core = make_core(32, 4, 8, 64)
    inspector = Inspector(core)
    for number, ending in enumerate(([1] * 5, [2] * 5), 1):
        params = SamplingParams(max_tokens=1, ignore_eos=True, seed=1)
        core.add(Request(number, [*PROMPT[:8], *ending], params))
        finish(core, inspector)
    runs = texts(inspector).nodes
    assert [(run.parent, len(run.blocks) // 4) for run in runs] == [(-1, 2), (0, 1), (0, 1)]


def test_hits_are_not_counted_once_nobody_asks() -> None:
    core = make_core(8, 4, 8, 64)
    inspector = Inspector(core)
    listeners = core.scheduler.blocks.cache.listeners
    before = list(listeners)
    pool(inspector)
    assert len(listeners) == len(before) + 1
    inspector._asked = float("-inf")
    step(core, inspector)
    assert listeners == before


def test_no_more_is_counted_of_texts_than_the_cache_has() -> None:
    """Each salt begins texts of its own, and is named by no block."""
    core = make_core(8, 4, 8, 64)
    inspector = Inspector(core)
    pool(inspector)
    for number in range(24):
        core.add(request(number, salt=f"salt {number}"))
        finish(core, inspector)
    assert texts(inspector).evictions > 24
    assert inspector._counts is not None and len(inspector._counts.evictions) <= 8


def own(inspector: Inspector, *requests: int) -> OwnAnswer:
    answer = inspector.answer(OwnQuestion(list(requests)))
    assert isinstance(answer, OwnAnswer)
    return answer


def test_a_requests_blocks_are_counted_while_it_runs_and_when_they_are_cached() -> None:
    core = make_core(16, 4, 8, 64)
    inspector = Inspector(core)
    core.add(request(7, n=2))
    step(core, inspector, 3)
    assert own(inspector, 7) == OwnAnswer(active=5, shared=3, cached=0, host=0)
    finish(core, inspector)
    kept = own(inspector, 7)
    assert (kept.active, kept.shared, kept.host) == (0, 0, 0) and kept.cached >= 3
    core.add(request(8))
    step(core, inspector, 2)
    assert own(inspector, 7).shared == own(inspector, 7).active >= 2  # the newer one names them alone
    assert own(inspector, 7, 8).active > own(inspector, 7).active
    assert own(inspector, 9) == OwnAnswer(0, 0, 0, 0)


def test_no_more_is_looked_at_than_takes_a_moment() -> None:
    """However large the pool, and however many are asked about: the first blocks of the first are counted."""
    core = make_core(16, 4, 8, 64)
    inspector = Inspector(core)
    for number in (7, 8):
        core.add(request(number))
    step(core, inspector, 3)
    few, enough = (OwnBlocks(core.scheduler.state, most_looks=looks) for looks in (3, 100))
    assert few.count([7, 8]) == OwnAnswer(active=2, shared=2, cached=0, host=0, partial=True)
    assert few.count(range(100, 1000)).partial
    whole = enough.count([7, 8])
    assert whole.active > 2 and not whole.partial


def test_no_more_is_remembered_of_what_has_ended_than_the_pool_has() -> None:
    core = make_core(16, 4, 8, 64)
    inspector = Inspector(core)
    for number in range(8):
        core.add(request(number))
        step(core, inspector, 2)
        assert own(inspector, number).active >= 3
        finish(core, inspector)
    assert own(inspector, 7).cached >= 3
    assert own(inspector, 0) == OwnAnswer(0, 0, 0, 0)


def test_moves_are_asked_for_from_an_answer_on() -> None:
    core = make_core(16, 4, 8, 64)
    inspector = Inspector(core)
    core.add(request(7))
    step(core, inspector, 2)
    first = pool(inspector)
    finish(core, inspector)
    later = inspector.answer(PoolQuestion(first.end))
    assert isinstance(later, PoolAnswer) and later.begin == first.end and later.exact is None
    assert moves(first) + moves(later) == moves(pool(inspector))
    nothing = inspector.answer(PoolQuestion(NO_MOVES, True))
    assert isinstance(nothing, PoolAnswer) and (nothing.moves, nothing.begin) == (b"", later.end)
