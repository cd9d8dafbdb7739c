"""Rows of the embedding matrix: exact, whatever the width."""

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.pointwise.embedding import embed


@pytest.mark.parametrize("width", [64, 1000, 1024, 2560])
@pytest.mark.parametrize("count", [0, 1, 37])
def test_equals_torch(width, count, dtype, device):
    torch.manual_seed(width)
    table = torch.randn(50, width).to(device, dtype)
    tokens = torch.randint(50, (count,), dtype=torch.int32).to(device)
    assert torch.equal(embed(tokens, table), F.embedding(tokens, table))
