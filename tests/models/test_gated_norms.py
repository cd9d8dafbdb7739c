"""Norms with a gate that are found in a model: what they are is proved, others are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from quire.engine.models.general.gated_norms import GatedNormModule, gated_norm_of
from quire.kernels.backend import torch_backend


def random_weight(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    module.weight.data = torch.randn(96)
    return module


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (Qwen3NextRMSNormGated(96), (1, "silu", False)),
        (KimiLinearRMSNormGated(96), (1, "sigmoid", False)),
        (MambaRMSNormGated(96, 32), (3, "silu", True)),
    ],
    ids=["Qwen3-Next", "Kimi Linear", "Mamba 2"],
)
def test_those_of_models_are_known_and_give_the_same(module, found) -> None:
    norm = gated_norm_of(random_weight(module))
    assert norm is not None and (norm.groups, norm.activation, norm.gate_first) == found
    x, gate = torch.randn(2, 1, 5, 96)
    same = GatedNormModule(norm, torch_backend())(x, gate)
    torch.testing.assert_close(same, module(x, gate), rtol=1e-5, atol=1e-6)


class Tanh(Qwen3NextRMSNormGated):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return LlamaRMSNorm.forward(self, hidden_states) * gate.tanh()


class Scaled(Qwen3NextRMSNormGated):
    def forward(self, hidden_states: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
        return scale * super().forward(hidden_states, gate)


@pytest.mark.parametrize("module", [Tanh(96), Scaled(96), LlamaRMSNorm(96), nn.Linear(96, 96, bias=False)])
def test_others_are_left_alone(module) -> None:
    if module.weight.dim() == 1:
        random_weight(module)
    assert gated_norm_of(module) is None
