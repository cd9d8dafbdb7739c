"""Sums over ranks in the order of the ranks, whichever way the numbers go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.engine.parallel.sums import sum_in_order, sum_in_slices
from tests.models.thread_ranks import Meeting, Rank, on_all


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (64, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_have_the_bits_of_the_whole(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    terms = torch.randn(size, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    meeting = Meeting(size)

    def total(number: int) -> Tensor:
        rank = Rank(number, meeting)
        return sum_in_slices(
            terms[number], size, lambda x: rank.all_gather(x)[:, number].contiguous(), rank.all_gather
        )

    expected = sum_in_order(terms)
    assert expected.shape == shape
    for each in on_all(meeting, total):
        assert torch.equal(each, expected)


def test_a_number_s_sum_does_not_depend_on_where_it_stands() -> None:
    terms = torch.randn(4, 9, 5, generator=torch.Generator().manual_seed(1))
    turned = sum_in_order(terms.flip(1).contiguous())
    assert torch.equal(turned.flip(0), sum_in_order(terms))
    assert torch.equal(sum_in_order(terms)[0], ((terms[0] + terms[1]) + terms[2] + terms[3])[0])
