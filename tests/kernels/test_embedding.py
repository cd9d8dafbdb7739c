"""Rows of the embedding matrix: exact, whatever the width."""

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.pointwise.embedding import embed, embed_reference


@pytest.mark.parametrize("width", [64, 1000, 1024, 2560])
@pytest.mark.parametrize("count", [0, 1, 37])
def test_equals_torch(width, count, dtype, device):
    torch.manual_seed(width)
    table = torch.randn(50, width).to(device, dtype)
    tokens = torch.randint(50, (count,), dtype=torch.int32).to(device)
    assert torch.equal(embed(tokens, table), F.embedding(tokens, table))


def test_tokens_of_other_parts_are_zeros(dtype, device):
    table = torch.randn(10, 70).to(device, dtype)
    tokens = torch.tensor([19, 20, 25, 29, 30, 0], dtype=torch.int32, device=device)
    found = embed(tokens, table, 20)
    assert torch.equal(found, embed_reference(tokens, table, 20))
    assert torch.equal(found[1:4], table[[0, 5, 9]])
    assert not found[[0, 4, 5]].any()


@pytest.mark.parametrize("function", [embed, embed_reference])
@pytest.mark.parametrize("first", [None, 20])
def test_rows_are_scaled_as_torch_scales_them(function, first, dtype, device):
    """By a number of their dtype, as Gemma's are by the root of their width."""
    table = torch.randn(10, 70).to(device, dtype)
    tokens = torch.tensor([0, 5, 9], dtype=torch.int32, device=device) + (first or 0)
    scale = torch.tensor(1152**0.5).to(dtype)
    found = function(tokens, table, first, scale=float(scale))
    assert torch.equal(found, table[[0, 5, 9]] * scale.to(device))
