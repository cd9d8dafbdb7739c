"""Forks share all blocks and copy one when they write to it (PagedAttention, section 4.4)."""

from __future__ import annotations

from tests.engine.tables import Tables


def test_a_fork_shares_all_blocks() -> None:
    tables = Tables(8, 4)
    parent, child = tables.group([1, 2, 3, 4, 5, 6], n=2)  # a full block, and one that is not
    tables.write(parent, [])
    tables.fork(parent, child)
    assert child.table == parent.table
    assert tables.counts(parent) == [2, 2]
    assert tables.blocks.pool.num_active == 2
    tables.check()


def test_who_writes_to_a_shared_block_first_copies_it() -> None:
    tables = Tables(8, 4)
    parent, child = tables.group([1, 2, 3, 4, 5, 6], n=2)
    tables.write(parent, [])
    tables.fork(parent, child)
    tables.step()
    full, shared = parent.table

    tables.write(parent, [7])
    assert parent.table[0] == full and parent.table[1] != shared
    assert tables.blocks.moves.copies == {parent.row: (shared, parent.table[1])}
    assert child.table == [full, shared]

    tables.write(child, [8])  # nobody else names the block now: it is written in place
    assert child.table == [full, shared]
    assert tables.blocks.copies_on_write == 1
    tables.step()


def test_a_full_block_is_never_copied() -> None:
    tables = Tables(8, 4)
    parent, child = tables.group([1, 2, 3, 4], n=2)
    tables.write(parent, [])
    tables.fork(parent, child)
    tables.step()
    tables.write(parent, [5])
    tables.write(child, [6])
    assert parent.table[0] == child.table[0] and parent.table[1] != child.table[1]
    assert tables.blocks.copies_on_write == 0
    tables.step()


def test_who_leaves_gives_back_only_what_nobody_shares() -> None:
    tables = Tables(8, 4)
    parent, child = tables.group([1, 2, 3, 4, 5, 6], n=2)
    tables.write(parent, [])
    tables.fork(parent, child)
    tables.step()
    tables.write(parent, [7])
    tables.leave(parent)
    assert tables.counts(child) == [1, 1]
    assert tables.blocks.pool.num_free == 6
    tables.check()
