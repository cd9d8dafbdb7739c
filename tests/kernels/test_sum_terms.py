"""Sums of terms that lie one behind the other."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.parallel.terms import BLOCK, sum_terms, sum_terms_reference


@pytest.mark.parametrize("length", [1, 96, BLOCK, 2 * BLOCK + 8])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_terms_are_added_in_their_order_and_rounded_once(device, dtype, count, length):
    torch.manual_seed(0)
    terms = torch.randn(count, length, device=device).to(dtype)
    terms[:, -1] = -0.0
    total = sum_terms(terms)
    assert torch.equal(total, sum_terms_reference(terms))
    if dtype == torch.float32 and count == 3:
        in_order = (terms[0] + terms[1]) + terms[2]
        assert torch.equal(total, in_order)


def test_no_numbers_have_no_sum(device):
    assert sum_terms(torch.empty(4, 0, device=device)).shape == (0,)
