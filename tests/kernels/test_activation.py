"""Activations alone, and of gates times up: against fp64, and against what a Llama MLP computes."""

import pytest
import torch
from torch.nn.functional import silu

from quire.kernels.pointwise.activation import (
    UNGATED,
    activated,
    activated_reference,
    gated,
    gated_reference,
    silu_mul,
)

SHAPES = [(1, 64), (3, 1024), (2, 1500)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(shape, device, dtype):
    tokens, width = shape
    gate_up = (4 * torch.randn(tokens, 2 * width + 8, device=device)).to(dtype)[:, : 2 * width]
    # The SiLU and its product with up may each round an ulp apart.
    tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
    result, expected = silu_mul(gate_up), gated_reference(gate_up, "silu")
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_gate_comes_first(shape, device):
    gate, up = torch.randn(2, *shape, device=device, dtype=torch.float64)
    expected = silu(gate) * up
    gate_up = torch.cat((gate, up), dim=-1).float()
    for result in (silu_mul(gate_up), gated_reference(gate_up, "silu")):
        torch.testing.assert_close(result, expected.float(), rtol=1e-5, atol=1e-5)


def test_extreme_gates_stay_finite(device):
    gate_up = torch.tensor([[-80.0, 1e4, 2.0, 2.0]], device=device)
    torch.testing.assert_close(silu_mul(gate_up), torch.tensor([[0.0, 2e4]], device=device))


def test_no_tokens(device):
    assert silu_mul(torch.empty(0, 64, device=device)).shape == (0, 32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", UNGATED)
def test_activations_alone(name, shape, device, dtype):
    x = (4 * torch.randn(shape[0], shape[1] + 8, device=device)).to(dtype)[:, : shape[1]]
    tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
    expected = activated_reference(x.double(), name)
    torch.testing.assert_close(activated(x, name).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_other_gates(name, device, dtype):
    gate_up = (4 * torch.randn(3, 200, device=device)).to(dtype)
    tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
    expected = gated_reference(gate_up, name)
    torch.testing.assert_close(gated(gate_up, name), expected, rtol=tolerance, atol=tolerance)
