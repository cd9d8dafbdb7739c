"""The partly filled last block of a pinned prefix: found as far as tokens agree, and copied on write."""

from __future__ import annotations

from quire.engine.arrays import as_int32
from quire.engine.hashing import BlockHasher
from quire.engine.memory.pinned_tails import PinnedTails, Tail
from quire.engine.memory.prefix_cache import Found
from quire.engine.sequences.sequence import Sequence
from tests.engine.tables import Tables

PINNED = list(range(10))  # two full blocks of four, and two tokens


def pinned_tables() -> tuple[Tables, int]:
    """A block manager in which PINNED was computed and ended; the block that holds its last tokens."""
    tables = Tables(12, 4, hasher=BlockHasher(4, seed=0))
    prefixes = tables.blocks.contents.open_to_all(PINNED)
    (sequence,) = tables.group(PINNED)
    tables.write(sequence, [])
    tail = sequence.table[2]
    tables.step()
    tables.leave(sequence)
    for prefix in prefixes:
        block = tables.blocks.cache.find(prefix)
        assert block is not None
        tables.blocks.pool.pin(block)
    tables.blocks.pool.pin(tail)
    tables.check()
    return tables, tail


def found_by(tables: Tables, prompt: list[int], salt: str = "tenant") -> tuple[Sequence, Found]:
    (sequence,) = tables.group(prompt, salt=salt)
    return sequence, tables.blocks.contents.with_tail(sequence, tables.blocks.match(sequence))


def test_it_is_found_as_far_as_tokens_agree_but_for_the_last_one() -> None:
    tables, tail = pinned_tables()
    for prompt, expected in [
        ([*PINNED, 50], Tail(tail, 2)),
        ([*PINNED, 50, 51, 52, 53, 54], Tail(tail, 2)),
        (PINNED, Tail(tail, 1)),
        ([*PINNED[:9], 50, 51], Tail(tail, 1)),
        ([*PINNED[:8], 50, 51], None),
        ([*PINNED[:9]], None),
        ([*PINNED[:8]], None),
        ([*PINNED[:4], 8, 9, 50], None),
        ([8, 9, 50], None),
    ]:
        sequence, found = found_by(tables, prompt)
        assert found.tail == expected, prompt
        tables.leave(sequence)


def test_the_first_write_behind_it_goes_to_a_copy() -> None:
    tables, tail = pinned_tables()
    one, found = found_by(tables, [*PINNED, 50])
    other, same = found_by(tables, [*PINNED[:9], 60, 61], "another")
    for sequence, what, context in ((one, found, 10), (other, same, 9)):
        tables.blocks.attach(sequence, what)
        assert sequence.table[2] == tail and not tables.blocks.is_writable(sequence, context)
        tables.rows.context[sequence.row] = what.num_tokens(4)
        assert tables.rows.context[sequence.row] == context
        tables.write(sequence, [])
    assert tables.blocks.moves.copies == {one.row: (tail, one.table[2]), other.row: (tail, other.table[2])}
    assert len({tail, one.table[2], other.table[2]}) == 3
    tables.step()
    assert one.table[:2] == other.table[:2] and tables.counts(one) == tables.counts(other) == [2, 2, 1]
    tables.write(one, [70, 71, 72])
    tables.step()
    tables.leave(one, other)
    tables.step()
    assert tables.blocks.pool.num_pinned == 3
    assert tables.blocks.pool.num_cached == 3 + 1  # the one that the first has filled


def test_it_goes_to_host_memory_with_a_group_that_has_not_written_yet() -> None:
    """A copy that the next plan would have made is not going to be: the pinned block holds the tokens."""
    tables = Tables(12, 4, hasher=BlockHasher(4, seed=0), num_host_blocks=8)
    tables.blocks.contents.open_to_all(PINNED)
    (sequence,) = tables.group(PINNED)
    tables.write(sequence, [])
    tail = sequence.table[2]
    tables.step()
    tables.leave(sequence)
    one, found = found_by(tables, [*PINNED, 50])
    tables.blocks.attach(one, found)
    tables.rows.context[one.row] = 10
    tables.write(one, [])
    assert tables.blocks.swap_out(one.group)
    assert [transfer.device for transfer in tables.blocks.moves.swap_out][-1] == tail


def test_only_what_was_asked_for_is_kept_and_once() -> None:
    tails = PinnedTails()
    tokens = as_int32([1, 2, 3])
    assert not tails.keep(None, tokens, 5)
    tails.want(None, tokens)
    assert tails.num_wanted == 1
    assert not tails.keep(None, as_int32([1, 2]), 5)
    assert tails.keep(None, tokens, 6) and not tails.keep(None, tokens, 7)
    tails.want(None, tokens)
    assert (tails.num_wanted, len(tails), list(tails.blocks())) == (0, 1, [6])
    assert 6 in tails and 5 not in tails
    tails.want(None, as_int32([1, 2, 4, 5]))
    assert tails.keep(None, as_int32([1, 2, 4, 5]), 8)
    assert tails.find(None, as_int32([1, 2, 4, 9])) == Tail(8, 3)
    assert tails.find(None, as_int32([1, 2, 3, 9])) == Tail(6, 3)
    assert tails.find(None, as_int32([2])) is None and tails.find(None, as_int32([])) is None
