"""A pool to play with: what each operation does to tables, reference counts and blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.lab import OutOfBlocks, Pool, four_beams


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(num_blocks=64, block_size=16)
    yield pool
    pool.check()


def ran(pool: Pool) -> list[str]:
    return [call.name for call in pool.path]


def test_tokens_take_blocks_one_after_the_other(pool: Pool) -> None:
    sequence = pool.sequence()
    assert sequence.block_table == [] and pool.used == 0
    sequence.append(1)
    assert sequence.block_table == [0] and pool.fragmentation == 15 / 16
    sequence.append(16)
    assert sequence.block_table == [0, 1] and pool.reference_counts == {0: 1, 1: 1}
    assert "BlockPool.allocate_many" in ran(pool)
    sequence.append(15)
    assert pool.used == 2 and pool.fragmentation == 0


def test_a_fork_counts_once_more_and_copies_nothing(pool: Pool) -> None:
    parent = pool.sequence()
    parent.append(20)
    child = parent.fork()
    assert child.block_table == parent.block_table and child.parent == parent.id
    assert pool.reference_counts == {0: 2, 1: 2} and pool.copies == 0
    assert (pool.used, pool.naive) == (2, 4)
    assert {"BlockManager.fork", "BlockPool.share"} <= set(ran(pool))


@pytest.mark.parametrize("write", [lambda s: s.append(1), lambda s: s.write_last()])
def test_a_write_to_a_shared_block_goes_to_a_copy(pool: Pool, write) -> None:  # type: ignore[no-untyped-def]
    parent = pool.sequence()
    parent.append(20)
    child = parent.fork()
    write(child)
    assert (parent.block_table, child.block_table, pool.copies) == ([0, 1], [0, 2], 1)
    assert pool.reference_counts == {0: 2, 1: 1, 2: 1}
    assert "BlockManager.copy_on_write" in ran(pool)
    write(parent)  # it is the only one now
    assert parent.block_table == [0, 1] and pool.copies == 1


def test_a_full_block_is_shared_for_good(pool: Pool) -> None:
    parent = pool.sequence()
    parent.append(16)
    child = parent.fork()
    child.append(1)
    assert child.block_table == [0, 1] and pool.copies == 0


def test_freed_blocks_are_given_out_again(pool: Pool) -> None:
    first, second = pool.sequence(), pool.sequence()
    first.append(16)
    second.append(16)
    first.free()
    assert pool.reference_counts == {1: 1} and pool.free == 63
    with pytest.raises(ValueError, match="sequence 1 was freed"):
        first.append(1)


def test_an_append_that_finds_no_block_changes_nothing() -> None:
    pool = Pool(num_blocks=2, block_size=4)
    parent = pool.sequence()
    parent.append(6)
    child = parent.fork()
    before = pool.view()
    for tokens in (1, 2):  # a block for the copy, and one after that
        with pytest.raises(OutOfBlocks, match="0 are free"):
            child.append(tokens)
        assert "Nothing has changed" in pool.said
    after = pool.view()
    assert (after.blocks, after.sequences) == (before.blocks, before.sequences)
    with pytest.raises(OutOfBlocks, match="9 tokens are more than the 8"):
        parent.append(3)
    parent.free()
    child.append(2)
    pool.check()


def test_published_blocks_are_found_by_who_begins_alike(pool: Pool) -> None:
    first = pool.sequence("a text")
    first.append(40)
    first.publish()
    first.free()
    assert (pool.used, pool.cached, pool.free) == (0, 2, 62)
    second, third = pool.sequence("a text"), pool.sequence("another")
    second.append(40)
    third.append(40)
    assert second.block_table[:2] == [0, 1] and not set(second.block_table) & set(third.block_table)
    second.write_last()
    assert pool.copies == 0  # its third block is its own


def test_a_write_to_a_block_that_can_be_found_goes_to_a_copy(pool: Pool) -> None:
    sequence = pool.sequence("a text")
    sequence.append(16)
    sequence.publish()
    sequence.write_last()
    assert sequence.block_table == [1] and pool.copies == 1 and pool.cached == 1
    again = pool.sequence("a text")
    again.append(17)
    assert again.block_table[0] == 0


def test_publishing_the_same_shares_one_block(pool: Pool) -> None:
    pair = pool.sequence("a text"), pool.sequence("a text")
    for sequence in pair:
        sequence.append(16)
    assert pool.used == 2
    for sequence in pair:
        sequence.publish()
    assert pair[0].block_table == pair[1].block_table == [0] and pool.used == 1


def test_cached_blocks_are_evicted_when_no_other_is_left() -> None:
    pool = Pool(num_blocks=2, block_size=4)
    first = pool.sequence("a text")
    first.append(8)
    first.publish()
    first.free()
    assert pool.evict() == 1 and (pool.cached, pool.free) == (1, 1)  # children before parents
    pool.sequence().append(8)
    assert pool.cached == 0 and "BlockPool._evict" in ran(pool)
    with pytest.raises(OutOfBlocks, match="no block is cached"):
        pool.evict()
    pool.check()


def test_swapping_moves_one_sequence_and_leaves_what_others_share(pool: Pool) -> None:
    parent = pool.sequence()
    parent.append(20)
    child = parent.fork()
    child.append(1)
    child.swap_out()
    assert child.block_table == [] and len(child.host_table) == 2 and pool.host_used == 2
    assert parent.block_table == [0, 1] and pool.used == 2 and pool.reference_counts == {0: 1, 1: 1}
    with pytest.raises(ValueError, match="sequence 2 is swapped out, swap it in first"):
        child.append(1)
    child.swap_in()
    assert len(child.block_table) == 2 and pool.host_used == 0 and child.num_tokens == 21
    child.append(1)
    parent.swap_out()
    parent.free()
    assert pool.host_used == 0


def test_what_was_published_is_shared_again_after_a_swap(pool: Pool) -> None:
    parent = pool.sequence()
    parent.append(17)
    parent.publish()
    child = parent.fork()
    child.swap_out()
    child.swap_in()
    assert child.block_table[0] == parent.block_table[0]


def test_a_swap_without_room_changes_nothing() -> None:
    pool = Pool(num_blocks=2, block_size=4, num_host_blocks=1)
    sequence = pool.sequence()
    sequence.append(8)
    with pytest.raises(OutOfBlocks, match="it takes 2 host blocks"):
        sequence.swap_out()
    assert sequence.block_table == [0, 1]
    small = Pool(num_blocks=2, block_size=4)
    first, second = small.sequence(), small.sequence()
    first.append(8)
    first.swap_out()
    second.append(4)
    with pytest.raises(OutOfBlocks, match="it takes 2 blocks, and 1"):
        first.swap_in()
    second.free()
    first.swap_in()
    for each in (pool, small):
        each.check()


@pytest.mark.parametrize(("generated", "used", "naive"), [(10, 8, 20), (16, 8, 20), (17, 12, 24)])
def test_the_lessons_four_beams(pool: Pool, generated: int, used: int, naive: int) -> None:
    said = four_beams(pool, generated)
    assert (pool.used, pool.naive, pool.copies) == (used, naive, 0)
    assert f"take {used} blocks, and {naive}" in said
    assert all(count in (1, 4) for count in pool.reference_counts.values())


def test_a_notebook_draws_it(pool: Pool) -> None:
    four_beams(pool)
    html = pool._repr_html_()
    assert html.count("<span") == 64 and "8 blocks used, 20 without sharing" in html
    assert repr(pool).startswith("Pool(64 blocks of 16 tokens: 8 used")
    assert repr(pool.sequences[0]) == "Sequence 1 (74 tokens in blocks [0, 1, 2, 3, 4])"


def test_sizes_are_bounded() -> None:
    with pytest.raises(ValueError, match="block_size must be between 1 and 128, got 0"):
        Pool(block_size=0)
