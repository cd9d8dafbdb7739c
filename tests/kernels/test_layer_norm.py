"""Layer norm: torch's in fp64 is the measure of the kernel and of the reference."""

import pytest
import torch
import torch.nn.functional as F
from products import product

from quire.kernels.linear.linear import Linear
from quire.kernels.linear.recipes import ADD_LAYER_NORM
from quire.kernels.pointwise.layer_norm import (
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_reference,
)
from quire.kernels.recipes import choose

SHAPES = [(1, 64), (3, 96), (5, 1000), (2, 4096)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def exact(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    weight, bias = (None if each is None else each.double() for each in (weight, bias))
    return F.layer_norm(x.double(), x.shape[-1:], weight, bias, 1e-5)


def assert_near(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.dtype == dtype
    tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", ["weight and bias", "weight", "neither"])
@pytest.mark.parametrize("function", [layer_norm, layer_norm_reference])
def test_layer_norm(function, affine, shape, device, dtype):
    tokens, hidden = shape
    x = (3 * torch.randn(tokens, hidden + 8, device=device) + 2).to(dtype)[:, :hidden]  # strided rows
    weight, bias = torch.randn(2, hidden, device=device).to(dtype)
    weight, bias = None if affine == "neither" else weight, bias if "bias" in affine else None
    assert_near(function(x, weight, bias, 1e-5), exact(x, weight, bias), dtype)


def test_numbers_of_a_row_may_lie_apart(device):
    x, (weight, bias) = torch.randn(5, 96, device=device), torch.randn(2, 96, device=device)
    result = layer_norm(x.T.contiguous().T, weight, bias, 1e-5)
    assert_near(result, exact(x, weight, bias), torch.float32)
    with pytest.raises(ValueError, match="expected it contiguous"):
        layer_norm(x, weight, bias.repeat_interleave(2)[::2], 1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", [add_layer_norm, add_layer_norm_reference])
def test_add_layer_norm_updates_the_residual_in_place(function, shape, device, dtype):
    x, residual = torch.randn(2, *shape, device=device).to(dtype)
    weight, bias = torch.randn(2, shape[1], device=device).to(dtype)
    expected = x + residual
    result = function(x, residual, weight, bias, 1e-5)
    assert torch.equal(residual, expected)
    assert_near(result, exact(expected, weight, bias), dtype)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("function", [add_layer_norm, add_layer_norm_reference])
def test_parts_of_a_sum_are_added_up_with_its_bias_before_they_are_rounded(
    function, biased, parts, device, dtype
):
    x = torch.randn(parts, 3, 96, device=device)
    residual = torch.randn(3, 96, device=device).to(dtype)
    weight, bias, added = torch.randn(3, 96, device=device).to(dtype)
    whole = x.double().sum(0) + (added.double() if biased else 0.0)
    expected = whole.to(dtype) + residual
    result = function(x, residual, weight, bias, 1e-5, added if biased else None)
    torch.testing.assert_close(residual, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert_near(result, exact(residual, weight, bias), dtype)


# The kernels of few tokens and Hopper's where there is a GPU: of several tokens no interpreter runs them.
TOKENS = [1, 7, 16, 40, 300] if torch.cuda.is_available() else [1, 3]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "columns"), [(64, 512), (1024, 4096)])
def test_products_into_the_residual(outputs, columns, biased, tokens, device):
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    x = torch.randn(tokens, columns, device=device).to(dtype)
    weight = (torch.randn(outputs, columns, device=device) * columns**-0.5).to(dtype)
    residual, (bias, norm, shift) = (
        torch.randn(tokens, outputs, device=device).to(dtype),
        torch.randn(3, outputs, device=device).to(dtype),
    )
    layer = Linear(weight, bias if biased else None)
    expected = residual.double() + F.linear(x.double(), weight.double(), bias.double() if biased else None)
    fused = tokens == 1 or (tokens <= 16 and dtype == torch.bfloat16)
    chosen = choose(ADD_LAYER_NORM, product(x, layer, fused=fused))
    result = chosen.run(residual, x, layer, norm, shift, 1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(residual.double(), expected, rtol=tolerance, atol=tolerance)
    assert_near(result, exact(residual, norm, shift), dtype)
