"""Cache groups: layers with windows have block tables of their own, and give back what is behind."""

from __future__ import annotations

from collections import Counter

import pytest

from quire.engine.hashing import BlockHasher
from quire.engine.memory.prefix_cache import Found
from quire.engine.messages import Request, SamplingParams
from quire.engine.pinned_prefixes import pin_prefixes
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.schedule.lifecycle import preempt
from quire.engine.sequences.sequence import Sequence
from tests.engine.oracle import expected_tokens
from tests.engine.simulation import make_core, simulate
from tests.engine.tables import Tables

WINDOWS = (5, 1000)  # tokens of 2 to a block; the second group keeps all, too


def make_tables(num_blocks: int = 60, *, caching: bool = True) -> Tables:
    return Tables(num_blocks, 2, hasher=BlockHasher(2, seed=1) if caching else None, windows=WINDOWS)


def make_lone(num_blocks: int = 60, num_host_blocks: int = 0) -> Tables:
    """Of layers that have one window, all of them."""
    hasher = BlockHasher(2, seed=1)
    return Tables(
        num_blocks, 2, hasher=hasher, num_host_blocks=num_host_blocks, windows=WINDOWS[:1], keeps_all=False
    )


def begin(tables: Tables, prompt: list[int]) -> tuple[Sequence, Found]:
    """A sequence that begins with what is found of its prompt."""
    (sequence,) = tables.group(prompt)
    found = tables.blocks.match(sequence)
    tables.blocks.attach(sequence, found)
    tables.rows.context[sequence.row] = found.num_tokens(2)
    return sequence, found


@pytest.mark.parametrize("caching", [True, False])
def test_what_is_behind_the_window_is_given_back_once_it_is_computed(caching: bool) -> None:
    tables = make_tables(caching=caching)
    (sequence,) = tables.group(list(range(12)))
    tables.write(sequence, [])
    pool = tables.blocks.pool
    assert pool.num_active == 18  # six blocks of each group
    tables.step()
    window, full = sequence.window_tables
    assert (window.first, len(window.blocks)) == (4, 2)  # token 12 reads 8 to 11, and itself
    assert (full.first, len(full.blocks)) == (0, 6)
    assert pool.num_active == 14 and pool.num_cached == (4 if caching else 0)
    tables.leave(sequence)
    assert pool.num_active == 0 and pool.num_cached == (18 if caching else 0)
    tables.check()


def test_a_hit_needs_no_more_of_a_window_than_is_read() -> None:
    tables = make_tables()
    first, _ = begin(tables, list(range(12)))
    tables.write(first, [])
    tables.step()
    second, found = begin(tables, [*range(12), 99])
    assert len(found) == 6 and [(each.first, len(each.blocks)) for each in found.windows] == [(4, 2), (0, 6)]
    assert second.table == first.table and second.window_tables[0].blocks == first.window_tables[0].blocks
    tables.check()


def test_layers_of_one_window_keep_no_more_than_that() -> None:
    tables = make_lone(num_blocks=8)
    sequence, _ = begin(tables, [0])
    for token in range(1, 200):  # in blocks for 16
        tables.write(sequence, [token])
        tables.step()
    (window,) = sequence.tables
    blocks = list(window.blocks)
    assert sequence.num_blocks == 100 and window.first == 98
    assert tables.blocks.pool.num_active == 2 and tables.blocks.pool.num_cached == 6
    tables.leave(sequence)
    again, found = begin(tables, [*range(200), 999])
    assert len(found) == 100 and [(each.first, len(each.blocks)) for each in found.windows] == [(98, 2)]
    assert begin(tables, [*range(199), 999])[1].num_tokens(2) == 198
    assert not len(begin(tables, [*range(100), 999])[1]), "what was read there is evicted"
    assert again.blocks == blocks
    tables.check()


def test_forks_of_layers_of_one_window_go_to_host_memory_and_back() -> None:
    tables = make_lone(num_host_blocks=20)
    parent, child = tables.group(list(range(9)), n=2)
    tables.write(parent, [])
    tables.step()
    tables.fork(parent, child)
    tables.write(child, [50])
    assert len(tables.blocks.moves.copies) == 1 and parent.num_blocks == child.num_blocks == 5
    tables.step()
    assert tables.blocks.swap_out(parent.group)
    blocks = list(parent.blocks)
    tables.leave(parent, child)
    assert len(tables.step().swap_out) == 4, "what they share goes once"
    tables.blocks.host.publish(parent.group)
    for sequence in (parent, child):
        tables.rows.assign(sequence)
    tables.blocks.swap_in(parent.group)
    assert [table.first for table in (*parent.tables, *child.tables)] == [2, 3]
    assert blocks[0] == parent.blocks[0], "it was found on the device"
    tables.step()


def test_a_hit_ends_where_a_window_is_no_longer_cached() -> None:
    tables = make_tables()
    first, _ = begin(tables, list(range(12)))
    tables.write(first, [])
    behind = first.window_tables[0].blocks[1]  # of tokens 2 and 3
    tables.step()
    tables.leave(first)
    windowed, _ = tables.blocks.windows.caches if tables.blocks.windows else ()
    tables.blocks.pool.discard(behind)
    windowed.forget(behind)
    assert len(begin(tables, [*range(12), 99])[1]) == 6  # whose window begins behind it
    assert len(begin(tables, [*range(8), 99])[1]) == 4  # and this, too
    shorter, found = begin(tables, [*range(7), 99])
    assert len(found) == 1  # behind three blocks, token 6 would read tokens 2 and 3
    assert tables.blocks.contents.explain_miss(shorter, len(found)).kind == "behind_window"
    tables.check()


def test_the_last_token_of_a_prompt_that_is_cached_is_never_all_that_is_computed() -> None:
    """Else a copy of the last block of each group would have to be made for it."""
    tables = make_tables()
    first, _ = begin(tables, list(range(12)))
    tables.write(first, [])
    tables.step()
    assert len(begin(tables, list(range(12)))[1]) == 5


def test_forks_share_and_copy_on_write_in_each_group() -> None:
    tables = make_tables()
    parent, child = tables.group(list(range(9)), n=2)
    tables.write(parent, [])
    tables.step()
    tables.fork(parent, child)
    assert child.blocks == parent.blocks
    assert not tables.blocks.is_writable(child, 9)
    tables.write(child, [50])
    assert len(tables.blocks.moves.copies) == tables.blocks.copies_on_write == 3
    assert [a == b for a, b in zip(child.table, parent.table, strict=True)] == [True] * 4 + [False]
    for own, theirs in zip(child.window_tables, parent.window_tables, strict=True):
        assert own.blocks[:-1] == theirs.blocks[:-1] and own.blocks[-1] != theirs.blocks[-1]
    tables.check()
    tables.leave(child)
    assert not tables.blocks.moves.copies and tables.blocks.is_writable(parent, 9)
    tables.step()


def test_a_beam_that_follows_another_keeps_its_last_blocks() -> None:
    tables = make_tables()
    first, second = tables.group([1, 2], n=2)
    tables.write(first, [])
    tables.fork(first, second)
    tables.write(first, [3])
    tables.write(second, [4])
    tables.step()
    blocks, allocations = list(second.blocks), tables.blocks.pool.allocations
    tables.follow(first, second)
    assert second.blocks == blocks and tables.blocks.pool.allocations == allocations
    assert len(tables.blocks.moves.copies) == 3
    tables.check()


def test_unpublished_blocks_behind_a_window_are_forgotten_when_they_are_given_back_early() -> None:
    tables = make_tables()
    sequence, _ = begin(tables, list(range(12)))
    tables.blocks.grow(sequence, 12)
    tables.blocks.mark_computing(sequence, 0, 12)
    tables.blocks.take_moves()
    tables.rows.context[sequence.row] = 12
    assert tables.blocks.give_back_behind(sequence, 12) == 4
    assert tables.blocks.pool.num_cached == 0
    tables.check()
    tables.blocks.publish([(sequence, 6)])
    tables.check()
    assert len(begin(tables, [*range(12), 99])[1]) == 6


@pytest.mark.parametrize(
    ("windows", "keeps_all"),
    [
        *((windows, True) for windows in ((5,), (3, 3), (8, 1000), (1,), (2, 9, 16))),
        *((windows, False) for windows in ((2,), (5,), (9,), (4, 12))),
    ],
)
def test_any_schedule_gives_the_same_tokens(windows: tuple[int, ...], keeps_all: bool) -> None:
    done: Counter[str] = Counter()
    for seed in (*range(16), 33, 39, 42, 50, 139):  # the last ones find blocks in host memory
        done += simulate(seed, pushed=seed % 3 == 1, windows=windows, keeps_all=keeps_all)
    reached = ("swaps", "recomputes", "copies", "cached", "from host", "evictions", "pinned")
    assert all(done[name] for name in reached), done


def test_a_prompt_that_one_group_has_lost_is_the_same_blocks_for_all_samples_in_every_group() -> None:
    """What another group has left of it is not named beside them: that is more blocks than there are."""
    core = make_core(14, 8, 2, 64, windows=(7,))
    params = SamplingParams(n=2, max_tokens=17, temperature=1.0, ignore_eos=True, seed=1)
    request = Request(0, list(range(10)), params)
    core.add(request)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    state, (cache, window) = core.scheduler.state, core.scheduler.blocks.caches
    (group,) = state.waiting

    def step() -> None:
        for output in core.step():
            tokens[output.index] += output.tokens

    while len(tokens[0]) < 14:
        step()
    preempt(state, group, swapped=False)
    state.waiting.clear()  # until the step in flight is committed
    step()
    state.waiting.append(group)
    for block in state.blocks.pool.next_to_evict(14):
        if block in window:
            state.blocks.pool.discard(block)
            window.forget(block)
    assert len(cache) and not len(window)
    while core.has_work:
        step()
        check_scheduler(state)
    assert tokens == {index: expected_tokens(request, index) for index in range(2)}
    assert core.scheduler.preemption.recomputes == 0


def test_what_the_device_had_no_room_for_is_found_in_host_memory_in_each_group() -> None:
    tables = Tables(40, 2, hasher=BlockHasher(2, seed=1), num_host_blocks=40, windows=WINDOWS)
    first, _ = begin(tables, list(range(12)))
    tables.write(first, [])
    tables.step()
    tables.leave(first)
    pool, host = tables.blocks.pool, tables.blocks.host
    host.spill(18, tables.blocks.moves)
    assert len(tables.step().spills) == 18 == host.pool.num_cached
    window_cache = tables.blocks.caches[1]
    while pool.num_cached:
        pool.evict()
    again, found = begin(tables, [*range(12), 99])
    assert len(found) == 6 and not found.on_device
    assert found.num_to_bring == 6 + 2 + 6 and found.num_from_host == 6
    assert len(tables.step().swap_in) == 14 and len(window_cache) == 2
    tables.leave(again)
    host.spill(40, tables.blocks.moves)
    assert not tables.step().spills, "all of it is in host memory already"
    assert not begin(tables, [*range(12), 99])[1].num_to_bring


def test_a_window_comes_from_host_memory_alone() -> None:
    tables = Tables(40, 2, hasher=BlockHasher(2, seed=1), num_host_blocks=40, windows=WINDOWS)
    first, _ = begin(tables, list(range(12)))
    tables.write(first, [])
    last = first.window_tables[0].blocks[-1]
    tables.step()
    tables.leave(first)
    tables.blocks.host.spill(18, tables.blocks.moves)
    tables.step()
    tables.blocks.pool.discard(last)
    tables.blocks.caches[1].forget(last)
    _, found = begin(tables, [*range(12), 99])
    assert len(found.device) == 6 and found.windows[0].on_host == {5}
    assert found.num_to_bring == found.num_from_host == 1 and len(tables.blocks.caches[1]) == 5
    assert len(tables.step().swap_in) == 1
    assert len(tables.blocks.caches[1]) == 6, "what has come is found on the device from then on"


def test_a_pinned_prefix_keeps_what_is_read_behind_it() -> None:
    core = make_core(40, 2, 4, 16, windows=(5,))
    pinned = list(range(12))
    assert pin_prefixes(core, [pinned]) == 6 + 2
    pool = core.scheduler.blocks.pool
    while pool.num_cached > 8:
        pool.evict()
    tables = core.scheduler.blocks
    assert len(tables.contents.pinned_blocks(tables.contents.open_to_all(pinned))) == 8
