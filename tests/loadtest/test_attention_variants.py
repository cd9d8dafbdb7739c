"""All ways through the blocks give what fp64 attention over the contiguous keys and values gives."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.loadtest import attention_variants
from quire.loadtest.attention_variants import VARIANTS, make_case


@pytest.mark.parametrize("name", VARIANTS)
@settings(deadline=None, max_examples=25)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 40),
    share=st.floats(0, 1),
    block_size=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 1 << 20),
)
def test_a_variant_is_attention(
    name: str, batch: int, length: int, share: float, block_size: int, seed: int
) -> None:
    queries = max(1, round(share * length))
    case = make_case(batch, length, queries, 2, 8, block_size, seed)
    scores = torch.einsum("bhqd,bhkd->bhqk", case.q.double(), case.keys.double()) * 8**-0.5
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[length - queries :]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    expected = torch.einsum("bhqk,bhkd->bhqd", weights, case.values.double())
    torch.testing.assert_close(VARIANTS[name](case).double(), expected, atol=1e-5, rtol=1e-4)


def test_what_is_printed_says_how_to_print_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention_variants, "DECODES", ((1, 20),))
    monkeypatch.setattr(attention_variants, "PREFILLS", ((1, 8),))
    monkeypatch.setattr(sys, "argv", ["attention_variants", "--rounds", "1", "--heads", "2"])
    attention_variants.main()
    out = capsys.readouterr().out
    assert "1 × 20" in out and "1 × 8" in out
    assert re.search(r"commit \S+, \d{4}-\d\d-\d\d: python -m .* --rounds 1 --heads 2$", out, re.MULTILINE)
