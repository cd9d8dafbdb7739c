"""Blocks of tokens that an indexer chooses, as the tokens that heads attend to."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.models.general.indexer import NONE, tokens_of_blocks


@given(st.data())
def test_they_are_those_that_come_no_later_in_order_and_nothing_behind_them(data: st.DataObject) -> None:
    size, position = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 30))
    some = st.lists(st.integers(0, position // size), unique=True, max_size=6)
    blocks = data.draw(some) + [NONE] * data.draw(st.integers(1, 3))
    found = tokens_of_blocks(
        torch.tensor(blocks).view(1, 1, 1, -1), torch.tensor([[position]]), size
    ).flatten()
    wanted = [each for each in range(position + 1) if each // size in blocks]
    assert found.tolist() == wanted + [NONE] * (len(blocks) * size - len(wanted))
