"""The prefix cache: what it finds, for whom, and in which order it forgets."""

from __future__ import annotations

from quire.engine.hashing import BlockHasher, Digest, Prefix, Prefixes
from tests.engine.tables import Tables


def cached(tables: Tables, tokens: list[int], salt: str = "") -> list[int]:
    """Compute `tokens`, end, and return the blocks that hold them and can be found from now on."""
    (sequence,) = tables.group(tokens, salt=salt)
    tables.write(sequence, [])
    tables.step()
    blocks = list(sequence.table)
    tables.leave(sequence)
    return blocks


def found(tables: Tables, tokens: list[int], salt: str = "") -> list[int]:
    (sequence,) = tables.group(tokens, salt=salt)
    blocks = list(tables.blocks.match(sequence).device)
    tables.rows.release(sequence)
    return blocks


def make_tables(num_blocks: int = 8, num_host_blocks: int = 0) -> Tables:
    return Tables(num_blocks, 2, hasher=BlockHasher(2, seed=3), num_host_blocks=num_host_blocks)


def test_full_blocks_are_found_and_what_differs_is_not() -> None:
    tables = make_tables()
    blocks = cached(tables, [1, 2, 3, 4, 5])
    assert found(tables, [1, 2, 3, 4, 9]) == blocks[:2]
    assert found(tables, [1, 2, 3]) == blocks[:1]
    assert found(tables, [1, 2, 9, 4]) == blocks[:1]
    assert found(tables, [3, 4]) == []  # the same tokens after others are something else
    assert found(tables, [9, 2, 3, 4]) == []
    again = cached(tables, [7, 7, 7, 7])  # a block after itself is something else too
    assert len(set(again)) == 2 and found(tables, [7, 7, 7, 7]) == again


def test_a_tenant_finds_only_its_own() -> None:
    tables = make_tables()
    blocks = cached(tables, [1, 2, 3, 4], salt="a")
    assert found(tables, [1, 2, 3, 4], salt="b") == found(tables, [1, 2, 3, 4]) == []
    assert found(tables, [1, 2, 3, 4], salt="a") == blocks
    others = cached(tables, [1, 2, 3, 4], salt="b")
    assert found(tables, [1, 2, 3, 4], salt="b") == others and not set(others) & set(blocks)


def test_what_is_open_to_all_is_found_by_all_and_what_comes_after_it_is_not() -> None:
    tables = make_tables(16)
    tables.blocks.contents.open_to_all([1, 2, 3, 4, 5])
    blocks = cached(tables, [1, 2, 3, 4, 5, 6], salt="a")
    assert found(tables, [1, 2, 3, 4, 5, 6], salt="a") == blocks
    assert found(tables, [1, 2, 3, 4, 5, 6], salt="b") == found(tables, [1, 2, 3, 4, 5, 6]) == blocks[:2]
    assert found(tables, [1, 2, 9, 9], salt="b") == blocks[:1]
    elsewhere = cached(tables, [3, 4], salt="a")  # the second block, without the first
    assert found(tables, [3, 4], salt="b") == [] and found(tables, [3, 4], salt="a") == elsewhere


def test_digests_depend_on_seed_and_model() -> None:
    roots = {BlockHasher(2, seed, model).root("s") for seed in (1, 2) for model in (b"m", b"n")}
    assert len(roots) == 4
    assert len({BlockHasher(2, seed).next(b"same", b"piece") for seed in (1, 2)}) == 2


def test_a_block_is_findable_only_once_its_step_is_committed() -> None:
    tables = make_tables()
    (sequence,) = tables.group([1, 2, 3, 4])
    tables.write(sequence, [])
    assert found(tables, [1, 2, 3, 4]) == []
    tables.step()
    assert found(tables, [1, 2, 3, 4]) == sequence.table


class CollidingHasher(BlockHasher):
    """Every first block has the same digest, so those after it do not tell what they follow."""

    def next(self, before: Digest, content: bytes) -> Digest:
        return b"the first block " if before == self.root("") else super().next(before, content)


def test_a_collision_is_a_miss_and_never_another_sequences_block() -> None:
    tables = Tables(16, 2, hasher=CollidingHasher(2, seed=0), num_host_blocks=8)
    (first,) = tables.group([1, 2, 5, 6])
    (second,) = tables.group([3, 4, 5, 6])  # the digests of both blocks are those of `first`
    for sequence in (first, second):
        tables.write(sequence, [])
    tables.step()
    assert [p.digest for p in first.prefixes] == [p.digest for p in second.prefixes]
    assert not set(first.table) & set(second.table)
    assert found(tables, [1, 2, 5, 6]) == first.table
    assert found(tables, [3, 4, 5, 6]) == []
    assert found(tables, [3, 4]) == []

    # Nor do they become one in host memory.
    for sequence in (first, second):
        assert tables.blocks.swap_out(sequence.group)
        tables.leave(sequence)
    tables.step()
    for sequence in (first, second):
        tables.blocks.host.publish(sequence.group)
    assert not set(first.host_table) & set(second.host_table)
    tables.check()


def test_a_child_is_no_hit_after_other_tokens_than_its_parent() -> None:
    """Its parent has been forgotten, and another block has taken the parent's digest."""
    tables = Tables(6, 2, hasher=CollidingHasher(2, seed=0))
    (parent,) = cached(tables, [1, 2])
    first, second = tables.group([1, 2, 5, 6], n=2)
    tables.write(first, [])
    tables.fork(first, second)
    tables.step()  # forks keep the block that they computed again, so only what comes after it is findable
    assert found(tables, [1, 2, 5, 6]) == [parent, first.table[1]]
    (filler,) = tables.group([0] * 8)
    tables.write(filler, [])
    assert parent in filler.table and found(tables, [1, 2]) == []
    tables.leave(filler)

    other = cached(tables, [3, 4])
    assert found(tables, [3, 4]) == other
    assert found(tables, [3, 4, 5, 6]) == other, "keys and values that were computed after other tokens"


def test_equal_chains_are_told_apart_by_any_token_and_by_their_tenant() -> None:
    hasher = BlockHasher(1, seed=0)

    def chain(tokens: list[int], salt: str = "") -> Prefix:
        prefixes: list[Prefix] = []
        Prefixes(hasher).extend(prefixes, hasher.block_contents(tokens), salt)
        return prefixes[-1]

    tokens = list(range(20))
    same, own = chain(tokens), chain(tokens)
    assert own is not same and own.before is not same.before
    assert own.equals(same)
    assert own.before is same.before, "what was compared once is not compared again"
    for changed in range(len(tokens)):
        assert not chain(tokens).equals(chain([*tokens[:changed], 99, *tokens[changed + 1 :]]))
    assert not chain(tokens).equals(chain(tokens, "tenant"))
    assert not chain(tokens).equals(chain(tokens[1:])) and not chain(tokens[1:]).equals(chain(tokens))


def test_a_block_computed_twice_is_kept_once() -> None:
    tables = make_tables()
    (first,), (second,) = tables.group([1, 2, 3]), tables.group([1, 2, 4])
    tables.write(first, [])
    tables.write(second, [])
    assert first.table[0] != second.table[0]
    tables.step()
    assert first.table[0] == second.table[0]
    assert (second.row, 0) in tables.blocks.moves.entries, "the device has to be told"
    assert tables.blocks.pool.num_active == 3


def test_children_are_evicted_before_their_parents() -> None:
    tables = make_tables()
    blocks = cached(tables, [1, 2, 3, 4, 5, 6])
    assert tables.blocks.pool.next_to_evict(8) == blocks[::-1]
    old = cached(tables, [7, 8])  # used last, so evicted last
    assert tables.blocks.pool.next_to_evict(8) == [*blocks[::-1], *old]
    (again,) = tables.group([1, 2, 9])
    tables.blocks.attach(again, tables.blocks.match(again))
    tables.leave(again)
    assert tables.blocks.pool.next_to_evict(8) == [blocks[2], blocks[1], old[0], blocks[0]]
    (other,) = tables.group([0] * 12)
    tables.write(other, [])  # takes the four free blocks and two cached ones, those in that order
    assert other.table[4:] == [blocks[2], blocks[1]]
    assert found(tables, [1, 2, 3, 4]) == blocks[:1]


def test_swapping_keeps_children_before_parents_in_both_tiers() -> None:
    tables = make_tables(8, 8)
    (sequence,) = tables.group([1, 2, 3, 4, 5, 6])
    tables.write(sequence, [])
    tables.step()
    blocks = list(sequence.table)
    assert tables.blocks.swap_out(sequence.group)
    tables.leave(sequence)
    tables.step()
    assert tables.blocks.pool.next_to_evict(8) == blocks[::-1]
    tables.blocks.host.publish(sequence.group)
    host_blocks = list(sequence.host_table)

    (filler,) = tables.group([0] * 16)
    tables.write(filler, [])  # nothing of it is left on the device
    tables.leave(filler)
    tables.rows.assign(sequence)
    tables.blocks.swap_in(sequence.group)
    tables.step()
    assert tables.blocks.host.pool.next_to_evict(8) == host_blocks[::-1]
    assert found(tables, [1, 2, 3, 4, 5, 6]) == sequence.table

    tables.leave(sequence)
    (filler,) = tables.group([9] * 16)
    tables.write(filler, [])
    tables.leave(filler)
    (again,) = tables.group([1, 2, 3, 4, 5, 6])
    hit = tables.blocks.match(again)
    assert (list(hit.device), list(hit.host)) == ([], host_blocks)
    tables.blocks.attach(again, hit)
    tables.step()
    assert tables.blocks.host.pool.next_to_evict(8) == host_blocks[::-1]


def test_spilled_blocks_are_evicted_first_and_found_in_host_memory() -> None:
    tables = make_tables(4, 8)
    blocks = cached(tables, [1, 2, 3, 4, 5, 6])
    tables.blocks.host.spill(2, tables.blocks.moves)
    moves = tables.step()
    assert [spill.device for spill in moves.spills] == [blocks[2], blocks[1]]
    assert tables.blocks.pool.next_to_evict(4) == blocks[::-1]
    tables.blocks.host.spill(2, tables.blocks.moves)
    assert not tables.blocks.moves.spills, "what is there already is not copied again"
    assert tables.blocks.pool.next_to_copy(3) == [blocks[0]], "nor looked for again"
    tables.blocks.host.spill(3, tables.blocks.moves)
    tables.step()
    (filler,) = tables.group([0] * 8)
    tables.write(filler, [])
    (again,) = tables.group([1, 2, 3, 4, 5, 6])
    assert len(tables.blocks.match(again).host) == 3


def test_a_block_is_copied_again_once_its_copy_was_evicted() -> None:
    tables = make_tables(4, 8)
    blocks = cached(tables, [1, 2, 3, 4])
    pool, host = tables.blocks.pool, tables.blocks.host
    host.spill(2, tables.blocks.moves)
    tables.step()
    host.spill(2, tables.blocks.moves)
    assert not pool.next_to_copy(2)
    while host.pool.num_cached > 1:
        host.pool.evict()
    assert pool.next_to_copy(2) == [blocks[1]]
    host.spill(2, tables.blocks.moves)
    assert [spill.device for spill in tables.step().spills] == [blocks[1]]


def test_a_block_is_not_copied_while_what_collides_with_it_is_in_host_memory() -> None:
    """Its copy would not be found, and so be made in each step."""
    tables = Tables(4, 2, hasher=CollidingHasher(2, seed=0), num_host_blocks=8)
    pool, host = tables.blocks.pool, tables.blocks.host
    cached(tables, [1, 2])
    host.spill(1, tables.blocks.moves)
    tables.step()
    pool.evict()
    second = cached(tables, [3, 4])
    for _ in range(2):
        host.spill(1, tables.blocks.moves)
        assert not tables.step().spills
    host.pool.evict()
    host.spill(1, tables.blocks.moves)
    assert [spill.device for spill in tables.step().spills] == second


def test_the_copy_of_a_block_that_was_used_again_lasts_as_long_as_new_ones() -> None:
    tables = make_tables(8, 12)
    first = cached(tables, [1, 2])
    pool, host = tables.blocks.pool, tables.blocks.host
    host.spill(1, tables.blocks.moves)
    (copy,) = [spill.host for spill in tables.step().spills]
    host.spill(1, tables.blocks.moves)
    second = cached(tables, [5, 6])
    host.spill(2, tables.blocks.moves)
    tables.step()
    assert host.pool.next_to_evict(2)[0] == copy
    pool.share(first[0])
    pool.release(first[0])
    assert pool.next_to_evict(2) == [*second, *first]
    host.spill(2, tables.blocks.moves)
    assert host.pool.next_to_evict(2)[1] == copy and not pool.next_to_copy(2)


def test_a_fork_in_host_memory_has_the_prefixes_of_what_it_shares() -> None:
    tables = Tables(8, 2, hasher=BlockHasher(2, seed=0), num_host_blocks=8)
    first, second = tables.group([1, 2, 3, 4], n=2)
    tables.write(first, [5, 6])
    tables.write(second, [7, 8])
    tables.step()
    assert tables.blocks.swap_out(first.group)
    tables.leave(first, second)
    tables.step()
    second.take_tokens(first)
    tables.blocks.host.fork(first, second)
    tables.check()
    assert second.host_table == first.host_table and second.host_published == first.host_published == 3


def test_a_block_shared_in_a_group_is_stored_once_in_host_memory() -> None:
    tables = Tables(8, 2, num_host_blocks=8)
    first, second = tables.group([1, 2, 3], n=2)
    tables.write(first, [])
    tables.fork(first, second)
    tables.write(second, [4, 5])
    tables.step()
    assert tables.blocks.swap_out(first.group)
    tables.leave(first, second)
    moves = tables.step()
    assert len(moves.swap_out) == 4  # one shared, one of the first, two of the second
    assert first.host_table[0] == second.host_table[0]
    for sequence in (first, second):
        tables.rows.assign(sequence)
    tables.blocks.swap_in(first.group)
    assert len(tables.step().swap_in) == 4
    assert tables.counts(first) == [2, 1] and tables.counts(second) == [2, 1, 1]
