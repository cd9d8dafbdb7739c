"""Decays and betas of the delta rule: the reference is transformers' code, the kernel is the reference."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForgetGate

from quire.kernels.recurrence.delta_gates import NUMBERS, delta_gates, delta_gates_reference

# Tokens and heads: one row of a program, several programs, odd heads, more heads than a program has numbers.
SHAPES = [(1, 32), (37, 48), (5, 3), (2, NUMBERS + 8)]
FUNCTIONS = [delta_gates, delta_gates_reference]


def drawn(shape, dtype, device):
    torch.manual_seed(0)
    tokens, heads = shape
    # Rows of a wider product; some beyond 20, where softplus is its argument, and some close to 0.
    a, b = (20.0 * torch.randn(tokens, 2 * heads, device=device)).to(dtype).split(heads, 1)
    a_log, dt_bias = torch.rand(heads, device=device).mul(16).log(), torch.randn(heads, device=device)
    return a, b, a_log.to(dtype), dt_bias.to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(shape, dtype, device):
    given = drawn(shape, dtype, device)
    (decays, betas), expected = delta_gates(*given), delta_gates_reference(*given)
    assert decays.dtype == torch.float32 and betas.dtype == dtype
    torch.testing.assert_close(decays, expected[0], rtol=1e-5, atol=1e-6)
    tolerance = max(1e-5, torch.finfo(dtype).eps)
    torch.testing.assert_close(betas, expected[1], rtol=tolerance, atol=1e-6)


def drawn_by_key(shape, numbers, dtype, device):
    """Return what `drawn` does, with decays of each of a head's numbers."""
    torch.manual_seed(0)
    tokens, heads = shape
    a, b = (
        (20.0 * torch.randn(tokens, heads * (numbers + 1), device=device))
        .to(dtype)
        .split([heads * numbers, heads], 1)
    )
    a_log, dt_bias = torch.rand(heads, device=device).mul(16).log(), torch.randn(a.shape[1], device=device)
    return a, b, a_log.to(dtype), dt_bias.to(dtype)


@pytest.mark.parametrize("shape", [(1, 32), (3, 5)])
@pytest.mark.parametrize("numbers", [128, 6])
def test_kernel_equals_reference_by_key(shape, numbers, dtype, device):
    given = drawn_by_key(shape, numbers, dtype, device)
    (decays, betas), expected = delta_gates(*given, 2.0), delta_gates_reference(*given, 2.0)
    assert decays.shape == (*shape, numbers) and betas.dtype == dtype
    torch.testing.assert_close(decays, expected[0], rtol=1e-5, atol=1e-6)
    tolerance = max(1e-5, torch.finfo(dtype).eps)
    torch.testing.assert_close(betas, expected[1], rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_they_are_what_kimi_linear_computes(function, device):
    config = KimiLinearConfig(hidden_size=24, linear_num_heads=3, linear_head_dim=8)
    gate = KimiLinearForgetGate(config).to(device)
    for weight in gate.parameters():
        torch.nn.init.normal_(weight, std=3.0)
    hidden, b = torch.randn(1, 5, 24, device=device), torch.randn(5, 3, device=device)
    with torch.no_grad():
        a = gate.f_b_proj(gate.f_a_proj(hidden))[0]
        decays, betas = function(a, b, gate.A_log.flatten(), gate.dt_bias, 2.0)
        torch.testing.assert_close(decays, gate(hidden)[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(betas, 2 * b.sigmoid(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_they_are_what_transformers_computes(function, device):
    a, b, a_log, dt_bias = drawn((37, 48), torch.float32, device)
    decays, betas = function(a, b, a_log, dt_bias)
    expected = -a_log.float().exp() * F.softplus(a.float() + dt_bias)  # as Qwen3.5 and Qwen3-Next have it
    torch.testing.assert_close(decays, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(betas, b.sigmoid(), rtol=1e-5, atol=1e-6)


def test_numbers_of_a_row_may_lie_apart(device):
    a, b, *weights = drawn((5, 3), torch.float32, device)
    expected = delta_gates_reference(a, b, *weights)
    apart = delta_gates(a.T.contiguous().T, b.T.contiguous().T, *weights)
    for ours, theirs in zip(apart, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_tokens(function, device):
    a, b, *weights = drawn((5, 3), torch.float32, device)
    assert [each.shape for each in function(a[:0], b[:0], *weights)] == [(0, 3), (0, 3)]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_does_not_fit_is_refused(function, device):
    a, b, a_log, dt_bias = drawn((5, 3), torch.float32, device)
    more = torch.cat((a, a[:, :1]), dim=1), b, a_log, torch.cat((dt_bias, dt_bias[:1]))  # four, for three
    for given in ((a, b[1:], a_log, dt_bias), (a, b, a_log[1:], dt_bias), (a, b, a_log, dt_bias[1:]), more):
        with pytest.raises(ValueError, match=r"expected \[T, H\] twice and \[H\] twice"):
            function(*given)
