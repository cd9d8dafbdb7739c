"""A block's life, step by step: free, active, shared, cached, evicted, held by a transfer."""

from __future__ import annotations

import pytest

from quire.engine.memory.pool import BlockPool, OutOfBlocks


def make_pool(num_blocks: int) -> tuple[BlockPool, list[int]]:
    """Return a pool, and the list of the blocks that it evicts."""
    evicted: list[int] = []
    return BlockPool(num_blocks, evicted.append), evicted


def test_a_block_is_active_while_a_table_names_it() -> None:
    pool, _ = make_pool(4)
    block = pool.allocate()
    assert (pool.num_active, pool.num_free) == (1, 3)
    pool.release(block)
    assert (pool.num_active, pool.num_free) == (0, 4)


def test_a_shared_block_is_freed_with_the_last_table_that_names_it() -> None:
    pool, _ = make_pool(4)
    block = pool.allocate()
    pool.share(block)
    assert pool.count(block) == 2 and pool.num_active == 1
    pool.release(block)
    assert pool.num_active == 1
    pool.release(block)
    assert pool.num_free == 4


def test_a_block_worth_keeping_is_cached_until_its_room_is_needed() -> None:
    pool, evicted = make_pool(2)
    older, newer = pool.allocate_many(2)
    pool.keep(older)
    pool.keep(newer)
    pool.release(older, newer)
    assert (pool.num_cached, pool.num_free, pool.num_available) == (2, 0, 2)
    pool.share(older)  # a hit makes it active again, and cached last
    pool.release(older)
    assert pool.allocate() == newer and evicted == [newer]


def test_out_of_blocks_changes_nothing() -> None:
    pool, _ = make_pool(2)
    pool.allocate()
    with pytest.raises(OutOfBlocks):
        pool.allocate_many(2)
    assert (pool.num_active, pool.num_free) == (1, 1)


def test_a_block_in_transfer_is_given_to_nobody() -> None:
    pool, _ = make_pool(1)
    block = pool.allocate()
    pool.hold(block)
    pool.release(block)
    assert (pool.num_in_transfer, pool.num_available) == (1, 0)
    pool.unhold(block)
    assert (pool.num_in_transfer, pool.num_available) == (0, 1)
