"""MinivLLM's walk-through of its block manager, on Quire's: the same questions, by the names they have here.

| MinivLLM           | Quire                                                                           |
| ------------------ | ------------------------------------------------------------------------------- |
| can_allocate(seq)  | `blocks_for(tokens)` is not above `pool.num_available`: cached ones count, too   |
| allocate(seq)      | `match` finds blocks, `attach` shares them, `grow` adds the others               |
| can_append(seq)    | the row's capacity is above its context, or a block is available                |
| append(seq)        | `grow` by one token; `publish` once a step has filled a block                    |
| deallocate(seq)    | `free`: children before parents; what is published stays, to be found or evicted |
"""

from __future__ import annotations

import pytest

from quire.engine.hashing import BlockHasher
from quire.engine.memory.pool import OutOfBlocks
from quire.engine.sequences.sequence import Sequence
from tests.engine.tables import Tables

BLOCK_SIZE = 4
PROMPT = list(range(10))  # two full blocks and half of one


class WalkThrough:
    """A block manager of six blocks, asked as MinivLLM's is."""

    def __init__(self) -> None:
        self.tables = Tables(6, BLOCK_SIZE, hasher=BlockHasher(BLOCK_SIZE, seed=0))
        self.blocks = self.tables.blocks

    def sequence(self, prompt: list[int]) -> Sequence:
        return self.tables.group(prompt)[0]

    def can_allocate(self, sequence: Sequence) -> bool:
        return self.blocks.blocks_for(sequence.num_tokens) <= self.blocks.pool.num_available

    def allocate(self, sequence: Sequence) -> int:
        """Give the prompt blocks, computed in one step; return how many of its tokens were found."""
        found = self.blocks.match(sequence)
        self.blocks.attach(sequence, found)
        self.tables.rows.context[sequence.row] = cached = len(found) * BLOCK_SIZE
        self.tables.write(sequence, [])
        self.tables.step()
        return cached

    def can_append(self, sequence: Sequence) -> bool:
        full = self.tables.rows.context[sequence.row] == self.tables.rows.capacity[sequence.row]
        return not full or self.blocks.pool.num_available > 0

    def append(self, sequence: Sequence, token: int) -> None:
        self.tables.write(sequence, [token])
        self.tables.step()

    def deallocate(self, sequence: Sequence) -> None:
        self.tables.leave(sequence)
        self.tables.step()


def test_minivllm_walk_through() -> None:
    walk = WalkThrough()
    pool = walk.blocks.pool
    one = walk.sequence(PROMPT)
    assert walk.can_allocate(one)
    assert walk.allocate(one) == 0
    assert one.table == [0, 1, 2] and walk.tables.counts(one) == [1, 1, 1]

    # The same prompt again: its full blocks are found, the partly filled one has no digest and is its own.
    two = walk.sequence(PROMPT)
    assert walk.allocate(two) == 8
    assert two.table == [0, 1, 3] and walk.tables.counts(two) == [2, 2, 1]

    # Two tokens go into the last block. The third needs a new one, and what is full can be found from now on.
    for token in (100, 101):
        assert walk.can_append(one)
        walk.append(one, token)
    assert one.table == [0, 1, 2]
    walk.append(one, 102)
    assert one.table == [0, 1, 2, 4]
    assert one.published == 3

    # One block is left: `two` may fill its third and take it, and after that nobody can begin another.
    for token in (200, 201, 202):
        assert walk.can_append(two)
        walk.append(two, token)
    assert pool.num_available == 0
    assert walk.can_append(one) and walk.can_append(two)
    for token in (103, 104, 105):
        walk.append(one, token)
    assert not walk.can_append(one)
    with pytest.raises(OutOfBlocks):
        walk.blocks.grow(one, one.num_tokens + 1)

    # Where MinivLLM counts free blocks only, those that end but stay cached are room here as well.
    three = walk.sequence(list(range(50, 58)))
    assert not walk.can_allocate(three)
    walk.deallocate(one)
    assert walk.tables.counts(two) == [1, 1, 1, 1]
    assert pool.num_available == 2
    assert walk.can_allocate(three) and walk.can_append(two)

    walk.deallocate(two)
    assert pool.num_available == pool.num_blocks
    again = walk.sequence([*PROMPT, 100, 101, 102])
    assert walk.allocate(again) == 12  # both ended, and the prompt with two generated tokens is still found


def test_minivllm_a_digest_covers_all_tokens_before_a_block() -> None:
    """The same four tokens after another beginning are another block."""
    walk = WalkThrough()
    one, two = walk.sequence([0, 1, 2, 3, 9, 9, 9, 9]), walk.sequence([7, 1, 2, 3, 9, 9, 9, 9])
    assert walk.allocate(one) == 0
    assert walk.allocate(two) == 0
    assert not set(one.table) & set(two.table)
