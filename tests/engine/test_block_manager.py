"""Corners of the block manager that random operations reach too seldom."""

from __future__ import annotations

from quire.engine.hashing import BlockHasher
from quire.engine.memory.prefix_cache import Found
from quire.engine.sequences.sequence import Sequence
from tests.engine.tables import Tables


def test_what_was_to_be_done_for_a_row_is_undone_when_it_is_left() -> None:
    tables = Tables(8, 4)
    first, second = tables.group([1, 2], n=2)
    tables.write(first, [])
    tables.fork(first, second)
    tables.step()
    row = second.row
    tables.write(second, [3])
    assert tables.blocks.moves.copies and tables.blocks.moves.entries
    tables.leave(second)
    assert not tables.blocks.moves.copies
    assert all(key[0] != row for key in tables.blocks.moves.entries)
    tables.check()


def test_a_table_that_begins_again_is_published_again() -> None:
    tables = Tables(16, 2, hasher=BlockHasher(2, seed=0))
    first, second = tables.group([1, 2], n=2)
    tables.write(first, [3])
    tables.write(second, [9, 9, 9, 9])
    tables.step()
    tables.fork(first, second)
    tables.write(second, [4, 5, 6])
    tables.step()
    (again,) = tables.group([1, 2, 3, 4, 5, 6])
    assert list(tables.blocks.match(again).device) == second.table


def test_a_fork_gives_back_what_it_shares_no_more_and_undoes_its_copies() -> None:
    tables = Tables(8, 2)
    first, second = tables.group([1, 2, 3], n=2)
    tables.write(first, [])
    tables.fork(first, second)
    tables.step()
    tables.write(second, [4, 5, 6])
    assert list(tables.blocks.moves.copies) == [second.row]
    tables.fork(first, second)
    assert not tables.blocks.moves.copies
    assert tables.blocks.moves.entries == {(second.row, 1): first.table[1]}
    assert tables.counts(first) == [2, 2]
    tables.check()


def beams_with_last_blocks() -> tuple[Tables, list[Sequence]]:
    """Three that share a full block, and have written to one of their own each."""
    tables = Tables(8, 2)
    beams = tables.group([1, 2], n=3)
    tables.write(beams[0], [])
    for beam in beams[1:]:
        tables.fork(beams[0], beam)
    for token, beam in enumerate(beams):
        tables.write(beam, [token])
    tables.step()
    return tables, beams


def test_a_beam_that_follows_another_keeps_its_last_block() -> None:
    tables, (first, second, third) = beams_with_last_blocks()
    pool, copies = tables.blocks.pool, tables.blocks.copies_on_write
    before, allocations = [second.table, third.table], pool.allocations
    for child in (second, third):
        tables.follow(first, child)
    assert [second.table, third.table] == before and pool.allocations == allocations
    assert list(tables.blocks.moves.copies.values()) == [(first.table[1], table[1]) for table in before]
    assert tables.blocks.copies_on_write == copies + 2
    assert not tables.blocks.moves.entries  # the device knows these tables
    tables.check()


def test_a_beam_without_a_last_block_of_its_own_shares_the_one_it_follows() -> None:
    tables, (first, second, third) = beams_with_last_blocks()
    tables.fork(first, second)
    tables.step()
    tables.follow(third, second)
    assert second.table == third.table and not tables.blocks.moves.copies
    assert tables.counts(first) == [3, 1]
    tables.check()


def test_a_beam_does_not_write_over_what_is_on_its_way_to_the_host() -> None:
    tables = Tables(8, 4, hasher=BlockHasher(4, seed=0), num_host_blocks=8)
    (other,) = tables.group([1, 2, 3, 4])
    tables.blocks.attach(other, Found([], []))
    tables.write(other, [])
    tables.step()
    first, second = tables.group([1, 2, 3], n=2)
    tables.write(first, [])
    tables.blocks.attach(second, Found(other.table, []))
    tables.blocks.forget(other)
    assert tables.blocks.swap_out(other.group)
    tables.leave(other)
    assert tables.blocks.is_writable(second, 3)
    tables.follow(first, second)
    assert second.table == first.table and not tables.blocks.moves.copies
    tables.check()


def test_a_fork_of_what_was_found_can_be_swapped_out() -> None:
    tables = Tables(16, 2, hasher=BlockHasher(2, seed=0), num_host_blocks=16)
    (other,) = tables.group([1, 2, 3, 4])
    tables.write(other, [])
    tables.step()
    tables.leave(other)
    first, second = tables.group([1, 2, 3, 4, 5], n=2)
    tables.blocks.attach(first, tables.blocks.match(first))
    tables.rows.context[first.row] = 4
    tables.write(first, [])
    tables.fork(first, second)
    first.finish_reason = "stop"
    tables.leave(first)
    assert tables.blocks.swap_out(first.group)
    tables.check()
    assert len(second.host_table) == 3


def test_forks_go_on_sharing_a_block_that_was_computed_twice() -> None:
    tables = Tables(16, 2, hasher=BlockHasher(2, seed=0))
    (other,) = tables.group([1, 2, 3, 4])
    first, second = tables.group([1, 2, 3, 4], n=2)
    tables.write(other, [])
    tables.write(first, [])
    tables.fork(first, second)
    tables.step()
    assert first.table == second.table
    assert tables.blocks.pool.num_active == 4
