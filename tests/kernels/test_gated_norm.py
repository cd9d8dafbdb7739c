"""RMSNorm with a gate: the reference is transformers' of several models, the kernel is the reference."""

from dataclasses import replace

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from quire.kernels.pointwise.gated_norm import GatedNorm, gated_norm, gated_norm_reference

# Rows, columns and groups: of heads, of all columns, of several groups, of odd sizes.
SHAPES = [(3, 64, 1), (1, 1000, 1), (9, 96, 1), (2, 4096, 8), (5, 96, 3)]
KINDS = [("silu", False), ("sigmoid", False), ("silu", True)]


def drawn(shape: tuple[int, int, int], kind, dtype, device) -> tuple[torch.Tensor, torch.Tensor, GatedNorm]:
    torch.manual_seed(0)
    rows, columns, groups = shape
    # Rows of a wider product, as the gate is one part of.
    both = torch.randn(rows, 2 * columns, device=device).to(dtype)
    weight = torch.randn(columns, device=device).to(dtype)
    return both[:, :columns], both[:, columns:], GatedNorm(weight, 1e-6, groups, *kind)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (KINDS[0], lambda columns, _: Qwen3NextRMSNormGated(columns)),
        (KINDS[1], lambda columns, _: KimiLinearRMSNormGated(columns)),
        (KINDS[2], lambda columns, groups: MambaRMSNormGated(columns, columns // groups, eps=1e-6)),
    ],
    ids=["Qwen3-Next", "Kimi Linear", "Mamba 2"],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_the_norm_of_models(shape, kind, make):
    x, gate, norm = drawn(shape, kind, torch.float32, torch.device("cpu"))
    module = make(shape[1], shape[2])
    module.weight.data = norm.weight
    if not norm.gate_first:  # these have one group, of which there are as many as rows
        x, gate = x[:, : shape[1]], gate[:, : shape[1]]
        norm = GatedNorm(norm.weight, norm.eps, 1, norm.activation, gate_first=False)
    torch.testing.assert_close(gated_norm_reference(x, gate, norm), module(x, gate), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(shape, kind, dtype, device):
    x, gate, norm = drawn(shape, kind, dtype, device)
    tolerance = max(1e-5, 2 * torch.finfo(dtype).eps)
    result, expected = gated_norm(x, gate, norm), gated_norm_reference(x, gate, norm)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def test_numbers_may_be_wider_than_the_weight_and_the_gate(device):
    x, gate, norm = drawn(SHAPES[0], KINDS[2], torch.float16, device)
    result, expected = gated_norm(x.float(), gate, norm), gated_norm_reference(x.float(), gate, norm)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", [0, 1])
def test_numbers_of_a_row_may_lie_apart(which, device):
    *given, norm = drawn(SHAPES[4], KINDS[0], torch.float32, device)
    expected = gated_norm_reference(*given, norm)
    given[which] = given[which].T.contiguous().T
    torch.testing.assert_close(gated_norm(*given, norm), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [gated_norm, gated_norm_reference])
def test_what_does_not_fit_is_refused(function, device):
    x, gate, norm = drawn(SHAPES[4], KINDS[0], torch.float32, device)
    for given in ((x, gate[1:], norm), (x[:, 3:], gate[:, 3:], norm), (x, gate, replace(norm, groups=5))):
        with pytest.raises(ValueError, match=r"expected \[T, H\] twice"):
            function(*given)
    apart = norm.weight.repeat_interleave(2)[::2]
    with pytest.raises(ValueError, match="expected it contiguous"):
        function(x, gate, replace(norm, weight=apart))


def test_no_rows_are_nothing(device):
    x, gate, norm = drawn(SHAPES[0], KINDS[0], torch.float32, device)
    assert gated_norm(x[:0], gate[:0], norm).shape == (0, 64)
