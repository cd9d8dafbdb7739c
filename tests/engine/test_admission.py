"""The capacity of an engine: it admits as much as it says there is room for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.capacity import Capacity
from quire.engine.messages import Request, SamplingParams


def admits(capacity: Capacity, prompt: int, n: int, max_tokens: int) -> bool:
    try:
        capacity.check(Request(1, [0] * prompt, SamplingParams(n=n, max_tokens=max_tokens)))
    except ValueError:
        return False
    return True


@given(
    st.integers(1, 300),
    st.sampled_from([2, 16]),
    st.integers(2, 500),
    st.integers(1, 600),
    st.integers(1, 128),
)
def test_each_of_n_sequences_gets_what_is_there_and_no_more(
    num_blocks: int, block_size: int, max_model_len: int, prompt: int, n: int
) -> None:
    capacity = Capacity(num_blocks, block_size, 128, max_model_len, vocab_size=10)
    room = capacity.room(prompt, n)
    if room >= 1:
        assert admits(capacity, prompt, n, room)
    if n > 1:
        assert not admits(capacity, prompt, n, max(room, 0) + 1)
    else:  # the last token of one that has all blocks is not asked for, though it would need no block
        assert room == min(max_model_len, num_blocks * block_size) - prompt


@pytest.mark.parametrize(("n", "room"), [(1, 412), (2, 205), (13, 29), (26, 13), (27, -3), (128, -3)])
def test_the_room_of_a_short_prompt_in_a_small_cache(n: int, room: int) -> None:
    assert Capacity(32, 16, 256, 4096, vocab_size=10).room(100, n) == room


def test_several_have_a_token_each_of_a_prompt_that_takes_the_whole_cache() -> None:
    """They share its blocks, and the token needs none."""
    assert Capacity(1, 2, 128, 7, vocab_size=10).room(2, 90) == 1
