"""RMSNorm: the reference is transformers' LlamaRMSNorm or Gemma's, the kernel is the reference."""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quire.kernels.pointwise.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

SHAPES = [(1, 64), (3, 96), (5, 1000), (2, 4096)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a few roundings of the type: the normalised value and its product may each be an ulp apart."""
    tolerance = max(1e-5, 4 * torch.finfo(expected.dtype).eps)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def llama_norm(weight: torch.Tensor, eps: float) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(len(weight), eps)
    norm.weight.data = weight
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_llama_rms_norm_bit_for_bit(shape, dtype):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    expected = llama_norm(weight, 1e-5)(x)
    assert torch.equal(rms_norm_reference(x, weight, 1e-5), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_gemmas_with_an_fp32_weight(shape, dtype):
    x, norm = torch.randn(shape).to(dtype), Gemma3RMSNorm(shape[1], 1e-6)
    norm.weight.data = torch.randn(shape[1]).to(dtype)
    same = rms_norm_reference(x, 1.0 + norm.weight.data.float(), 1e-6) == norm(x)
    assert float(same.float().mean()) > 0.99, "fp32 sums may end beside a tie of the rounding"


@pytest.mark.parametrize("shape", SHAPES)
def test_an_fp32_weight_is_multiplied_before_rounding(shape, device, dtype):
    x, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[1], device=device)
    expected = rms_norm_reference(x, weight, 1e-6)
    result = rms_norm(x, weight, 1e-6)
    assert_close(result, expected)
    if dtype != torch.float32:
        others = int((result != expected).sum())
        assert others <= 1 + result.numel() // 100, "fp32 sums may end beside a tie of the rounding"


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(shape, device, dtype):
    tokens, hidden = shape
    x = torch.randn(tokens, hidden + 8, device=device).to(dtype)[:, :hidden]  # strided rows
    weight = torch.randn(hidden, device=device).to(dtype)
    assert_close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))


def test_numbers_of_a_row_may_lie_apart(device):
    x, weight = torch.randn(5, 96, device=device), torch.randn(96, device=device)
    assert_close(rms_norm(x.T.contiguous().T, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    with pytest.raises(ValueError, match="expected it contiguous"):
        rms_norm(x, weight.repeat_interleave(2)[::2], 1e-6)
    with pytest.raises(ValueError, match="residual's numbers are 5 apart"):
        add_rms_norm(x, x.T.contiguous().T, weight, 1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_updates_the_residual_in_place(shape, device, dtype):
    x, residual = torch.randn(2, *shape, device=device).to(dtype)
    weight = torch.randn(shape[1], device=device).to(dtype)
    expected_sum = x + residual
    expected, _ = add_rms_norm_reference(x, residual.clone(), weight, 1e-6)
    y, total = add_rms_norm(x, residual, weight, 1e-6)
    assert total is residual
    assert torch.equal(residual, expected_sum)
    assert_close(y, expected)
    assert torch.equal(expected, rms_norm_reference(expected_sum, weight, 1e-6))


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_sums_parts_before_it_rounds(parts, shape, device, dtype):
    x = torch.randn(parts, *shape, device=device)
    residual, weight = (
        torch.randn(shape, device=device).to(dtype),
        torch.randn(shape[1], device=device).to(dtype),
    )
    expected_sum = x.double().sum(0).to(dtype) + residual
    for function in (add_rms_norm, add_rms_norm_reference):
        y, total = function(x, residual.clone(), weight, 1e-6)
        assert y.dtype == total.dtype == dtype
        # fp32 sums may be rounded to the neighbour of what the exact one is rounded to
        torch.testing.assert_close(total, expected_sum, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
        assert_close(y, rms_norm_reference(total, weight, 1e-6))


def test_large_half_precision_values_do_not_overflow(device):
    x = torch.full((1, 256), 60000.0, device=device, dtype=torch.float16)
    weight = torch.ones(256, device=device, dtype=torch.float16)
    assert torch.equal(rms_norm(x, weight, 1e-6), weight.unsqueeze(0))


def test_no_tokens(device):
    x = torch.empty(0, 64, device=device)
    assert rms_norm(x, torch.ones(64, device=device), 1e-6).shape == (0, 64)
