"""Fused linear layers of one token, against the unfused ones in fp64."""

import pytest
import torch
import torch.nn.functional as F

from kernels.gemv import (
    add_linear,
    add_linear_reference,
    norm_linear,
    norm_linear_reference,
    norm_silu_linear,
    norm_silu_linear_reference,
)

# (columns, outputs): one chunk, a ragged one, several, several and ragged; odd outputs
SHAPES = [(64, 8), (100, 7), (3072, 5), (2500, 3)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of sums of order one


def draw(columns: int, outputs: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """x [1, columns], norm [columns], weight [outputs, columns], bias [outputs]."""
    torch.manual_seed(0)
    shapes = [(1, columns), (columns,), (outputs, columns), (outputs,)]
    scales = [3.0, 1.0, columns**-0.5, 1.0]
    return tuple(
        (torch.randn(shape) * scale).to(device, dtype) for shape, scale in zip(shapes, scales, strict=True)
    )


def exact_norm(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], norm.double(), 1e-6)


def assert_near(result: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("columns", "outputs"), SHAPES)
@pytest.mark.parametrize("function", [norm_linear, norm_linear_reference])
@pytest.mark.parametrize("biased", [False, True])
def test_norm_linear(function, columns, outputs, biased, dtype, device):
    x, norm, weight, bias = draw(columns, outputs, dtype, device)
    result = function(x, norm, 1e-6, weight, bias if biased else None)
    exact = F.linear(exact_norm(x, norm), weight.double(), bias.double() if biased else None)
    assert_near(result, exact, dtype)


@pytest.mark.parametrize(("columns", "outputs"), SHAPES)
@pytest.mark.parametrize("function", [norm_silu_linear, norm_silu_linear_reference])
@pytest.mark.parametrize("biased", [False, True])
def test_norm_silu_linear(function, columns, outputs, biased, dtype, device):
    x, norm, weight, bias = draw(columns, 2 * outputs, dtype, device)
    result = function(x, norm, 1e-6, weight, bias if biased else None)
    both = F.linear(exact_norm(x, norm), weight.double(), bias.double() if biased else None)
    gate, up = both.chunk(2, dim=1)
    assert_near(result, F.silu(gate) * up, dtype)


@pytest.mark.parametrize(("columns", "outputs"), SHAPES)
@pytest.mark.parametrize("function", [add_linear, add_linear_reference])
@pytest.mark.parametrize("biased", [False, True])
def test_add_linear_works_in_place(function, columns, outputs, biased, dtype, device):
    x, _, weight, bias = draw(columns, outputs, dtype, device)
    residual = torch.randn(1, outputs).to(device, dtype)
    exact = residual.double() + F.linear(x.double(), weight.double(), bias.double() if biased else None)
    function(residual, x, weight, bias if biased else None)
    assert_near(residual, exact, dtype)


def test_several_tokens_are_refused(device):
    x, _, weight, _ = draw(64, 32, torch.float32, device)
    with pytest.raises(ValueError, match="for one token"):
        add_linear(torch.zeros(2, 32, device=device), x.repeat(2, 1), weight, None)


def test_a_transposed_weight_is_refused(device):
    x, _, weight, _ = draw(64, 64, torch.float32, device)
    with pytest.raises(ValueError, match="contiguous weight"):
        add_linear(torch.zeros(1, 64, device=device), x, weight.T, None)
