"""Gates of what attention gives: against the definition, rounded where transformers' code rounds."""

import pytest
import torch

from quire.kernels.pointwise.gate import BLOCK, sigmoid_gate, sigmoid_gate_reference

SHAPES = [(1, 64), (3, BLOCK), (2, 2 * BLOCK + 36)]
FUNCTIONS = [sigmoid_gate, sigmoid_gate_reference]


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(shape, device, dtype):
    torch.manual_seed(0)
    tokens, width = shape
    # Rows of wider products, as a gate is one part of.
    x, gate = (4 * torch.randn(2, tokens, width + 8, device=device)).to(dtype)[:, :, :width]
    tolerance = max(1e-6, 2 * torch.finfo(dtype).eps)  # both may round an ulp apart
    result, expected = sigmoid_gate(x, gate), sigmoid_gate_reference(x, gate)
    assert result.dtype == dtype and result.is_contiguous()
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_numbers_are_multiplied_by_the_sigmoid_of_a_gate(function, device):
    x, gate = torch.randn(2, 3, 40, device=device, dtype=torch.float64)
    expected = x / (1 + (-gate).exp())
    torch.testing.assert_close(function(x.float(), gate.float()), expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_tokens_and_numbers_that_lie_apart(function, device):
    x, gate = torch.randn(2, 5, 3, device=device)
    assert function(x[:0], gate[:0]).shape == (0, 3)
    apart = [each.T.contiguous().T for each in (x, gate)]
    torch.testing.assert_close(function(*apart), sigmoid_gate_reference(x, gate), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_does_not_fit_is_refused(function, device):
    x = torch.randn(5, 3, device=device)
    for gate in (x[1:], x[:, 1:]):
        with pytest.raises(ValueError, match=r"expected \[T, N\] of both"):
            function(x, gate)
