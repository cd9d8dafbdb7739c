"""The ring of moves: bounded by count and by age, and without objects that anything has to look through."""

from __future__ import annotations

import gc

from quire.engine.inspection.replay import Moved, read_moves
from quire.engine.memory.move_kinds import DEVICE, EVICT, HOST, KEEP, NOBODY, STEP
from quire.engine.memory.move_ring import CHUNK, MAX_SECONDS, MoveRing


def kept(ring: MoveRing, since: int = 0) -> list[Moved]:
    return list(read_moves(ring.since(since)[1]))


def test_moves_are_told_in_their_order_and_from_any_answer_on() -> None:
    ring = MoveRing(1000)
    ring.begin_step(1.5, 2)
    ring.mark(EVICT, 7)
    begin, numbers = ring.since(0)
    assert kept(ring) == [
        Moved(STEP, DEVICE, 1, 2, 1_500_000, []),
        Moved(EVICT, DEVICE, NOBODY, 0, 0, [7]),
    ]
    ring.mark_pair(KEEP + HOST, 8, 9)
    later = kept(ring, begin + len(numbers) // 8)
    assert [move for move in later if move.kind != STEP] == [Moved(KEEP, HOST, NOBODY, 0, 0, [8, 9])]
    assert kept(ring, ring.position) == []


def test_moves_stay_with_their_steps_until_there_is_time_to_put_them_away() -> None:
    ring = MoveRing(1000)
    for step, blocks in enumerate([[1, 2], [], [3], []], 1):
        ring.begin_step(0.0, 0)
        for block in blocks:
            ring.mark(EVICT, block)
        if step == 3:
            ring.flush()
    ring.mark(EVICT, 4)
    told = [(move.request, move.blocks) for move in kept(ring)]
    assert told == [(1, []), (NOBODY, [1]), (NOBODY, [2]), (3, []), (NOBODY, [3]), (4, []), (NOBODY, [4])]


def test_steps_without_moves_leave_nothing() -> None:
    ring = MoveRing(1000)
    for step in range(1000):
        ring.begin_step(float(step), 0)
    assert ring.position == 0
    ring.mark(EVICT, 1)
    assert [move.request for move in kept(ring)] == [1000, NOBODY]


def test_no_more_are_kept_than_may_be_and_the_first_is_the_beginning_of_a_step() -> None:
    ring = MoveRing(1000, max_numbers=4 * CHUNK)
    objects = 0
    for step in range(20_000):
        ring.begin_step(step / 1000, 0)
        for block in range(5):
            ring.mark(EVICT, block)
        if step == 10_000:
            gc.collect()
            objects = len(gc.get_objects())
    gc.collect()
    assert len(gc.get_objects()) - objects < 50
    begin, numbers = ring.since(0)
    assert 2 * CHUNK < len(numbers) // 8 < 6 * CHUNK and begin == ring.position - len(numbers) // 8
    moves = kept(ring)
    assert moves[0].kind == STEP and moves[-1].blocks == [4]


def test_what_is_too_old_goes() -> None:
    ring = MoveRing(1000)
    while ring.position < 3 * CHUNK:
        ring.begin_step(0.0, 0)
        ring.mark(EVICT, 1)
    end, now = ring.position, MAX_SECONDS + 1
    while ring.position < end + 2 * CHUNK:
        ring.begin_step(now, 0)
        ring.mark(EVICT, 1)
    assert ring.since(0)[0] > end - 2 * CHUNK


def test_a_small_pool_keeps_little() -> None:
    ring = MoveRing(16)
    for step in range(50_000):
        ring.begin_step(0.0, 0)
        ring.mark(EVICT, step % 16)
    assert len(ring.since(0)[1]) // 8 < 4 * CHUNK
