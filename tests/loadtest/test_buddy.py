"""The buddy allocator under any order of operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.loadtest.simulator.buddy import BuddyAllocator


class BuddyMachine(RuleBasedStateMachine):
    """The model: which slots are taken."""

    @initialize(size=st.integers(1, 300))
    def begin(self, size: int) -> None:
        self.buddy = BuddyAllocator(size)
        self.size = size
        self.taken: dict[int, range] = {}

    def is_free(self, chunk: range) -> bool:
        return not any(slot in taken for taken in self.taken.values() for slot in chunk)

    def could_hold(self, size: int) -> bool:
        """Whether an aligned chunk of `size` lies free within one power-of-two block of the arena."""
        return any(
            self.is_free(range(offset, offset + size)) for offset in range(0, self.size - size + 1, size)
        )

    @rule(count=st.integers(1, 310))
    def allocate(self, count: int) -> None:
        size = 1
        while size < count:
            size *= 2
        possible = self.could_hold(size)
        offset = self.buddy.allocate(count)
        assert (offset is not None) == possible, "a free chunk was not found, or one was made up"
        if offset is not None:
            chunk = range(offset, offset + size)
            assert offset % size == 0 and chunk.stop <= self.size
            assert self.is_free(chunk), "a slot is in two chunks"
            self.taken[offset] = chunk

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        self.buddy.free(offset)
        del self.taken[offset]

    @invariant()
    def books_are_right(self) -> None:
        assert self.buddy.chunks == {offset: len(chunk) for offset, chunk in self.taken.items()}
        assert self.buddy.used == sum(map(len, self.taken.values())) <= self.size
        if not self.taken:
            largest = self.buddy.allocate(1 << (self.size.bit_length() - 1))
            assert largest == 0, "chunks were not joined"
            self.buddy.free(largest)


BuddyMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBuddy = BuddyMachine.TestCase


def test_a_chunk_is_the_next_power_of_two() -> None:
    assert [BuddyAllocator.chunk_size(count) for count in (1, 2, 3, 4, 5, 1024, 1025)] == [
        1,
        2,
        4,
        4,
        8,
        1024,
        2048,
    ]
    with pytest.raises(ValueError, match="at least one slot"):
        BuddyAllocator(0)
