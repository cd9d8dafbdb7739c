"""A server checks a share of its blocks and sequences at a time: all shares notice what `check` notices."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from quire.engine.messages import Request, SamplingParams
from quire.engine.process import CHECK_SHARES
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.schedule.lifecycle import preempt
from quire.engine.schedule.scheduler import Scheduler
from tests.engine.simulation import make_core


@pytest.fixture(scope="module")
def busy() -> Scheduler:
    """With blocks that are active, cached and free, in both tiers."""
    core = make_core(60, 4, 8, 64, num_host_blocks=20, mode="swap")
    for i in range(40):
        prompt = [(5 * i + j) % 23 for j in range(6 + i)]
        core.add(Request(i, prompt, SamplingParams(max_tokens=20, ignore_eos=True, seed=i)))
    while not (core.scheduler.state.num_swapped and len(core.scheduler.state.running) > 2):
        core.step()
    for request in range(20, 40):
        core.abort(request)
    core.step()
    scheduler = core.scheduler
    pool, host = scheduler.blocks.pool, scheduler.blocks.host.pool
    assert min(pool.num_active, pool.num_cached, pool.num_free, host.num_active, host.num_cached) > 0
    return scheduler


def rename(scheduler: Scheduler) -> None:
    """A block is found by another one's tokens."""
    blocks = scheduler.blocks.cache._blocks
    first, second, *_ = blocks
    blocks[first], blocks[second] = blocks[second], blocks[first]


def mistake(scheduler: Scheduler) -> None:
    """A sequence's prefix has other tokens."""
    sequence = next(s for group in scheduler.state.running for s in group.live if s.prefixes)
    sequence.prefixes[0] = replace(sequence.prefixes[0], content=b"other")


def lose(scheduler: Scheduler) -> None:
    """A free block is on no list."""
    scheduler.blocks.pool._free.pop()


def double(scheduler: Scheduler) -> None:
    """A free block is on the list twice."""
    scheduler.blocks.pool._free.append(scheduler.blocks.pool._free[0])


def uncache(scheduler: Scheduler) -> None:
    scheduler.blocks.pool._cached.popitem()


def miscount(scheduler: Scheduler) -> None:
    scheduler.blocks.pool._counts[scheduler.state.running[0].live[0].table[0]] += 1


def hold(scheduler: Scheduler) -> None:
    scheduler.blocks.pool._holds[37] += 1


def keep(scheduler: Scheduler) -> None:
    """A block that nobody finds is kept."""
    pool = scheduler.blocks.pool
    pool._kept[pool._free[-1]] = True


def rest(scheduler: Scheduler) -> None:
    scheduler.blocks.pool._resting.add(scheduler.blocks.pool._free[-1])


def pin(scheduler: Scheduler) -> None:
    """A block that holds nothing."""
    scheduler.blocks.pool._pinned.add(scheduler.blocks.pool._free[-1])


def compute_a_free_block(scheduler: Scheduler) -> None:
    scheduler.blocks.cache.computing.add(scheduler.blocks.pool._free[-1])


def repeat(scheduler: Scheduler) -> None:
    """A table names a block twice, in place of another."""
    sequence = next(s for group in scheduler.state.running for s in group.live if len(s.table) > 1)
    sequence.table[0] = sequence.table[1]


def overtake(scheduler: Scheduler) -> None:
    """More context than the row's blocks hold."""
    scheduler.rows.context[scheduler.state.running[-1].live[0].row] += 100


def strand(scheduler: Scheduler) -> None:
    """A block in host memory that nobody names is counted."""
    scheduler.blocks.host.pool._counts[-1] += 1


def misplace(scheduler: Scheduler) -> None:
    """A block in host memory is found by no digest."""
    scheduler.blocks.host.cache._blocks.popitem()


def miscount_swapped_tokens(scheduler: Scheduler) -> None:
    """A group in host memory says that it has more tokens there than its blocks hold."""
    next(s for group in scheduler.state.waiting for s in group.live if s.host_table).saved_context += 4


def miscount_lockstep(scheduler: Scheduler) -> None:
    scheduler.state.num_in_lockstep += 1


def stop_unheard(scheduler: Scheduler) -> None:
    """A row that decodes is said not to, and the list of those that do stays."""
    assert len(scheduler.rows.decodes())
    scheduler.rows.decoding[:] = False


def need_unheard(scheduler: Scheduler) -> None:
    """More is wanted of a row's tokens than those who book them know of."""
    assert scheduler.rows._samples is not None
    scheduler.rows._needs_host ^= True


def prefill_what_decodes(scheduler: Scheduler) -> None:
    group = scheduler.state.running[0]
    assert scheduler.rows.decoding[group.live[0].row]
    group.prefill_queue.append(group.live[0])


def exchange(scheduler: Scheduler) -> None:
    """Two sequences get each other's tokens."""
    for step in scheduler.state.in_flight:
        assert len(step.samples.rows) > 1
        step.needs_host[:] = False
        step.samples.rows[:] = step.samples.rows[::-1].copy()


def copy_for_another(scheduler: Scheduler) -> None:
    first, second, *_ = (group.live[0] for group in scheduler.state.running)
    scheduler.state.shared_tails[first.row] = second


def test_all_is_well(busy: Scheduler) -> None:
    check_scheduler(busy.state)
    for share in CHECK_SHARES:
        check_scheduler(busy.state, share)


@pytest.mark.parametrize(
    "damage",
    [
        rename,
        mistake,
        lose,
        double,
        uncache,
        miscount,
        hold,
        keep,
        rest,
        pin,
        compute_a_free_block,
        repeat,
        overtake,
        strand,
        misplace,
        miscount_swapped_tokens,
        miscount_lockstep,
        stop_unheard,
        need_unheard,
        prefill_what_decodes,
        exchange,
        copy_for_another,
    ],
)
def test_damage_is_noticed_by_the_whole_check_and_by_one_of_its_shares(
    busy: Scheduler, damage: Callable[[Scheduler], None]
) -> None:
    damaged = copy.deepcopy(busy)
    check_scheduler(damaged.state)
    damage(damaged)
    with pytest.raises((AssertionError, KeyError)):
        check_scheduler(damaged.state)
    noticed = 0
    for share in CHECK_SHARES:
        try:
            check_scheduler(damaged.state, share)
        except (AssertionError, KeyError):
            noticed += 1
    assert noticed


@pytest.mark.parametrize("swapped", [False, True])
def test_a_window_block_that_is_still_read_may_not_be_given_back(swapped: bool) -> None:
    core = make_core(60, 4, 2, 64, num_host_blocks=60, windows=(9,))
    core.add(Request(0, list(range(16)), SamplingParams(max_tokens=20, ignore_eos=True, seed=1)))
    for _ in range(4):
        core.step()
    state = core.scheduler.state
    (group,) = state.running
    (sequence,) = group.live
    if swapped:
        assert state.blocks.swap_out(group)
        preempt(state, group, swapped=True)
        (table,), pool = sequence.host_window_tables, state.blocks.host.pool
    else:
        (table,), pool = sequence.window_tables, state.blocks.pool
    check_scheduler(state)
    pool.release(table.blocks.pop(0))
    table.first += 1
    if not swapped:
        state.rows.given_back[sequence.row] += 4
    with pytest.raises(AssertionError, match="read"):
        check_scheduler(state)
