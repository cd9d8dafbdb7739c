"""Which routers of transformers' models a kernel stands for, and that none is replaced that differs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.engine.models.general.modules import RouterModule
from quire.engine.models.general.routers import Router, router_of
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.kernels.backend import torch_backend
from quire.kernels.experts.routing import Divisor, Routing
from tests.models.any_model import save_tiny

HIDDEN = 64
SUM = Divisor(added=1e-20)
# A type, its class, what its configuration says, and how it routes.
THEIRS: list[tuple[str, str, dict[str, Any], Routing]] = [
    ("deepseek_v2", "DeepseekV2TopkRouter",
     {"n_routed_experts": 64, "num_experts_per_tok": 6, "topk_method": "greedy"}, Routing(6)),
    ("deepseek_v2", "DeepseekV2TopkRouter",
     {"n_routed_experts": 160, "num_experts_per_tok": 6, "topk_method": "group_limited_greedy", "n_group": 8,
      "topk_group": 3, "routed_scaling_factor": 16.0}, Routing(6, scale=16.0, groups=8, kept=3)),
    ("deepseek_v3", "DeepseekV3TopkRouter",
     {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
     Routing(8, "sigmoid", SUM, 2.5, groups=8, kept=4, group_by="two")),
    ("glm4_moe", "Glm4MoeTopkRouter", {"n_routed_experts": 128, "num_experts_per_tok": 8},
     Routing(8, "sigmoid", SUM)),
    ("dots1", "Dots1TopkRouter", {"n_routed_experts": 32, "num_experts_per_tok": 4, "n_group": 1},
     Routing(4, "sigmoid")),
    ("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", {}, Routing(6, divisor=Divisor(least=1e-12))),
    ("minimax_m2", "MiniMaxM2TopKRouter", {}, Routing(8, "sigmoid", Divisor())),
    ("hy_v3", "HYV3TopKRouter", {}, Routing(8, "sigmoid", SUM, 2.826)),
    ("lfm2_moe", "Lfm2MoeTopKRouter", {"num_experts": 32}, Routing(4, "sigmoid", Divisor(added=1e-6))),
    ("longcat_flash", "LongcatFlashTopkRouter", {}, Routing(12, scale=6.0)),
    ("qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": True}, Routing(8, divisor=Divisor())),
    ("gpt_oss", "GptOssTopKRouter", {}, Routing(4, divisor=Divisor())),
]  # fmt: skip
GIVEN_BIAS = ("minimax_m2", "hy_v3", "lfm2_moe")  # with each call
SCORES_ROUNDED = ("lfm2_moe",)  # which scores in what the model is in


def made(kind: str, name: str, said: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """Return a router with tensors of a dtype, but for biases of choices, which are kept in fp32."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](hidden_size=HIDDEN, **said)
    module: nn.Module = getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), name)(config)
    for own, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensor.data = torch.randn_like(tensor.data, dtype=torch.float32) / 5
        if "correction" not in own:
            tensor.data = tensor.data.to(dtype)
    return module


@torch.no_grad()
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize(("kind", "name", "said", "routing"), THEIRS, ids=[kind for kind, *_ in THEIRS])
def test_routers_of_transformers(
    kind: str, name: str, said: dict[str, Any], routing: Routing, dtype: torch.dtype
) -> None:
    """Experts are chosen as they were, in another order perhaps, and weigh the same to the last bits."""
    module = made(kind, name, said, dtype)
    found = router_of(module, dtype)
    if dtype != torch.float32 and kind in SCORES_ROUNDED:
        assert found is None
        return
    assert found is not None and found.routing == routing
    x, bias = torch.randn(200, HIDDEN).to(dtype), torch.randn(len(found.product.weight)) / 10
    given = (bias,) if kind in GIVEN_BIAS else ()
    ours = dict(zip(found.gives, RouterModule(found, torch_backend())(x, *given), strict=True))
    theirs = dict(zip(found.gives, module(x, *given), strict=True))
    torch.testing.assert_close(ours["logits"], theirs["logits"])
    index, order = (each["index"].sort(-1) for each in (ours, theirs))
    assert torch.equal(index.values, order.values)
    weights = ours["weights"].gather(1, index.indices)
    torch.testing.assert_close(weights, theirs["weights"].gather(1, order.indices))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_product_may_be_one_of_fp32_numbers(dtype: torch.dtype) -> None:
    exact = router_of(made("deepseek_v3", "DeepseekV3TopkRouter", {}, dtype), dtype)
    rounded = router_of(made("qwen3_moe", "Qwen3MoeTopKRouter", {}, dtype), dtype)
    assert exact is not None and exact.exact == (dtype == torch.bfloat16)
    assert rounded is not None and not rounded.exact


class Own(nn.Module):
    """A router that does a little else."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(12, 32)), nn.Parameter(torch.randn(12))
        self.register_buffer("correction", torch.zeros(12))
        self.top_k, self.kind = 3, kind
        self.factor, self.num_group, self.topk_group = 1.5, 4, 2

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        logits = nn.functional.linear(x, self.weight, self.bias)
        scores = torch.tanh(logits) if self.kind == "tanh" else logits.sigmoid()
        order = scores if self.kind == "unbiased" else scores + self.correction
        if self.kind == "limited":
            order = order.clamp(max=0.9)
        if self.kind == "other groups":
            order = order.masked_fill(order.unflatten(1, (4, 3)).mean(-1).repeat_interleave(3, 1) < 0.5, 0.0)
        index = order.topk(3, dim=-1).indices
        weights = scores.gather(1, index)
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-9 if self.kind == "added" else 0.0))
        if self.kind == "of one":
            return (weights, index[:, :1])
        return weights * (1.4 if self.kind == "scaled" else self.factor), index


@torch.no_grad()
def test_what_a_router_does_not_return_need_not_be_known() -> None:
    found = router_of(Own(), torch.float32)
    assert found is not None and found.gives == ("weights", "index")
    assert found.routing == Routing(3, "sigmoid", Divisor(), 1.5) and found.bias is not None


@torch.no_grad()
@pytest.mark.parametrize("kind", ["tanh", "unbiased", "limited", "other groups", "added", "of one", "scaled"])
def test_other_routers_are_left_alone(kind: str) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        assert router_of(Own(kind), torch.float32) is None, seed


def routers(kind: str, folder: Path) -> list[Router]:
    save_tiny(kind, folder)
    model: Any = load_model(
        folder, read_model(folder, "transformers"), torch_backend(), device="cpu", dtype=torch.float32,
        max_model_len=100,
    )[0]  # fmt: skip
    forwards = [module.forward for module in model.fusion.modules]
    return [each._router for each in forwards if isinstance(each, RouterModule)]


@pytest.mark.parametrize(
    ("kind", "layers"), [("deepseek_v2", 3), ("deepseek_v3", 3), ("hunyuan_v1_moe", 4), ("minimax_m2", 4)]
)
def test_routers_are_replaced_in_models(kind: str, layers: int, tmp_path: Path) -> None:
    assert len(routers(kind, tmp_path)) == layers
