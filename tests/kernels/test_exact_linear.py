"""Products as of fp32 numbers, whatever weight and tokens are held in."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.linear.exact import exact_linear
from quire.kernels.linear.linear import Linear


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 7, 40])
@pytest.mark.parametrize(("columns", "outputs"), [(512, 64), (100, 7)])
def test_nothing_is_rounded_but_sums(columns, outputs, tokens, biased, dtype, device):
    torch.manual_seed(0)
    x, weight = (torch.randn(rows, columns, device=device).to(dtype) for rows in (tokens, outputs))
    bias = torch.randn(outputs, device=device).to(dtype) if biased else None
    result = exact_linear(x, Linear(weight, bias))
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), exact, atol=2e-4, rtol=1e-5)


def test_a_weight_may_be_held_in_more_bits_than_tokens(device):
    x, weight = torch.randn(1, 64, device=device).bfloat16(), torch.randn(5, 64, device=device)
    for tokens in (x, x.repeat(3, 1)):
        torch.testing.assert_close(exact_linear(tokens, Linear(weight, None)), tokens.float() @ weight.T)
