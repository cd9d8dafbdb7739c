"""Norm, sum and norm in one: the three kernels one by one are the measure, to the bit; and fp64.

On a GPU a kernel adds up squares in an order that follows from how its numbers are aligned, so that now and
then a number that is next to a tie is rounded another way.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from paged import with_dtypes
from products import product

from quire.kernels.linear.linear import Linear
from quire.kernels.linear.recipes import ADD_SANDWICH
from quire.kernels.pointwise.norm import Norm, rms_norm, rms_norm_reference
from quire.kernels.pointwise.sandwich_norm import sandwich_norm, sandwich_norm_reference
from quire.kernels.recipes import choose

SHAPES = [(1, 64), (3, 96), (5, 1152), (2, 4096), (40, 160)]
KINDS = ("llama", "gemma", "none")
EPS = 1e-6


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def norm_of(hidden: int, kind: str, dtype: torch.dtype, device: torch.device) -> Norm | None:
    """Return a norm as Llama has it, as Gemma does, or none."""
    if kind == "none":
        return None
    weight = torch.randn(hidden, device=device).to(dtype)
    return Norm(1.0 + weight.float() if kind == "gemma" else weight, EPS)


def one_by_one(norm_by, x, residual, inner, outer):
    """Return the sum and what follows it, by a norm, an addition, and a norm."""
    total = residual + (x if inner is None else norm_by(x.contiguous(), inner.weight, inner.eps))
    return total, total if outer is None else norm_by(total, outer.weight, outer.eps)


@pytest.mark.parametrize(
    ("outer", "inner", "shape", "dtype"), with_dtypes(itertools.product(KINDS, KINDS, SHAPES))
)
@pytest.mark.parametrize(
    ("function", "norm_by"), [(sandwich_norm, rms_norm), (sandwich_norm_reference, rms_norm_reference)]
)
def test_it_gives_what_kernels_one_by_one_give(function, norm_by, inner, outer, shape, device, dtype):
    tokens, hidden = shape
    x, residual = torch.randn(2, tokens, hidden + 8, device=device).to(dtype)[..., :hidden]  # strided rows
    inner, outer = (norm_of(hidden, kind, dtype, device) for kind in (inner, outer))
    total, expected = one_by_one(norm_by, x, residual, inner, outer)
    result = function(x, residual, inner, outer)
    assert (result.data_ptr() == residual.data_ptr()) == (outer is None)
    for ours, theirs in ((residual, total), (result, expected)):
        tolerance = max(1e-5, 8 * torch.finfo(dtype).eps)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        if dtype != torch.float32:  # where a product and a sum may be one instruction
            others = int((ours != theirs).sum())
            assert others <= (1 + ours.numel() // 100 if ours.is_cuda else 0)


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", [sandwich_norm, sandwich_norm_reference])
def test_it_sums_parts_before_it_rounds(function, parts, shape, device, dtype):
    x = torch.randn(parts, *shape, device=device)
    residual = torch.randn(shape, device=device).to(dtype)
    norms = [norm_of(shape[1], kind, dtype, device) for kind in ("gemma", "llama")]
    rounded = x.double().sum(0).to(dtype)
    total, expected = one_by_one(rms_norm_reference, rounded, residual, *norms)
    result = function(x, residual, *norms)
    # An fp32 sum may be rounded to the neighbour of what the exact one is rounded to
    tolerance = max(1e-4, 8 * torch.finfo(dtype).eps)
    torch.testing.assert_close(residual, total, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=4 * tolerance)


def test_numbers_of_a_row_may_lie_apart_but_not_what_is_written(device):
    x, residual = torch.randn(2, 5, 96, device=device)
    inner, outer = (norm_of(96, kind, torch.float32, device) for kind in ("llama", "gemma"))
    total = residual.clone()
    expected = sandwich_norm_reference(x, total, inner, outer)
    apart = residual.T.contiguous().T
    result = sandwich_norm(x.T.contiguous().T, residual, inner, outer)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(result, expected)
    wide = Norm(torch.ones(192, device=device)[::2], EPS)
    for given in ((apart, inner, outer), (residual, wide, outer), (residual, inner, wide)):
        with pytest.raises(ValueError, match="expected it contiguous"):
            sandwich_norm(x, *given)
    torch.testing.assert_close(residual, total)


def test_no_tokens(device):
    x, residual = torch.empty(2, 0, 64, device=device)
    norm = Norm(torch.ones(64, device=device), EPS)
    assert sandwich_norm(x, residual, norm, norm).shape == (0, 64)


# One token, a few, and many; widths that Hopper's kernels take and others.
PRODUCTS = [
    (1, 96, 64), (3, 1000, 96), (7, 1024, 1152), (64, 2048, 256), (300, 512, 320),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "columns", "outputs"), PRODUCTS)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_into_the_residual(tokens, columns, outputs, biased, device, dtype):
    """By whatever is chosen here: a row at a time, the sums and norms of so many tokens."""
    weight = (torch.randn(outputs, columns, device=device) * columns**-0.5).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype) if biased else None
    x = torch.randn(tokens, columns, device=device).to(dtype)
    residual = torch.randn(tokens, outputs, device=device).to(dtype)
    layer, norms = Linear(weight, bias), [norm_of(outputs, "llama", dtype, device) for _ in range(2)]
    added = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    added = F.rms_norm(added, (outputs,), norms[0].weight.double(), EPS)
    total = residual.double() + added
    expected = F.rms_norm(total, (outputs,), norms[1].weight.double(), EPS)
    fused = tokens == 1
    result = choose(ADD_SANDWICH, product(x, layer, fused=fused)).run(residual, x, layer, *norms)
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(residual.double(), total, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=2 * tolerance)
