"""Time routers of experts: `python -m quire.loadtest.gpu_routers [--json FILE]`.

DeepSeek V2-Lite's and V3's, random weights in bf16, that the L2 cache does not hold, in CUDA graphs: by
transformers' code, and by our kernels, together and apart (the product of fp32 numbers; the choice). Tells in
how many rows the choice of experts differs, and how far weights and logits are apart. Needs one CUDA device.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from quire.engine.models.general.modules import RouterModule
from quire.engine.models.general.routers import router_of
from quire.kernels.backend import torch_backend, triton_backend
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.device_time import device_seconds

TOKENS = (1, 16, 256)
WEIGHT_BYTES = 240_000_000  # of all routers of a kind: several times an L2 cache
ROUTERS: dict[str, tuple[type[nn.Module], str, dict[str, Any]]] = {
    "deepseek-v2-lite": (
        DeepseekV2TopkRouter,
        "deepseek_v2",
        {"hidden_size": 2048, "n_routed_experts": 64, "num_experts_per_tok": 6, "topk_method": "greedy"},
    ),
    "deepseek-v3": (
        DeepseekV3TopkRouter,
        "deepseek_v3",
        {
            "hidden_size": 7168,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
        },
    ),
}


@dataclass(frozen=True, slots=True)
class RouterTime:
    """Microseconds of one router; rows that choose other experts; largest differences."""

    router: str
    tokens: int
    transformers_us: float
    kernels_us: float
    product_us: float
    choice_us: float
    rows_that_differ: int
    weights_apart: float
    logits_apart: float


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--json", type=Path, help="where one JSON object goes")
    arguments = parse_for_cuda(parser)
    found = []
    for name, (kind, model_type, sizes) in ROUTERS.items():
        copies = min(200, WEIGHT_BYTES // (2 * sizes["hidden_size"] * sizes["n_routed_experts"]))
        modules = [make_router(kind, model_type, sizes, torch.device("cuda")) for _ in range(copies)]
        for tokens in TOKENS:
            timed = measure(name, modules, tokens)
            print(
                f"{name:16} {tokens:4} tokens: transformers {timed.transformers_us:6.2f} µs, kernels "
                f"{timed.kernels_us:6.2f} ({timed.product_us:.2f} + {timed.choice_us:.2f}), other experts in "
                f"{timed.rows_that_differ} rows",
                flush=True,
            )
            found.append(asdict(timed))
    write_json(arguments.json, torch.cuda.get_device_name(), {"of": found})
    return 0


def make_router(
    kind: type[nn.Module], model_type: str, sizes: dict[str, Any], device: torch.device
) -> nn.Module:
    """Return a router with random weights, and a random bias of its choice where it has one."""
    module = kind(CONFIG_MAPPING[model_type](**sizes)).to(device)
    weight = torch.randn_like(module.get_parameter("weight")) / sizes["hidden_size"] ** 0.5
    module.get_parameter("weight").data = weight.bfloat16()
    for _, bias in module.named_buffers():
        bias.data = torch.randn_like(bias) / 10
    return module.requires_grad_(requires_grad=False)


@torch.inference_mode()
def measure(name: str, modules: Sequence[nn.Module], tokens: int) -> RouterTime:
    """Time routers one after the other, each with weights of its own.

    Raises ValueError where kernels do not compute them.
    """
    weight = modules[0].get_parameter("weight")
    device = weight.device
    backend = triton_backend() if device.type == "cuda" else torch_backend()
    found = [router_of(module, torch.bfloat16) for module in modules]
    routers = [each for each in found if each is not None]
    if len(routers) < len(modules) or not all(each.exact for each in routers):
        raise ValueError(f"{name}'s router was not found to be one that kernels compute")
    kernels = [RouterModule(each, backend) for each in routers]
    x = torch.randn(tokens, weight.shape[1], device=device).bfloat16()
    theirs, ours = modules[0](x), kernels[0](x)
    logits = backend.exact_linear(x, routers[0].product)

    def microseconds(calls: Sequence[partial[Any]]) -> float:
        return round(1e6 * device_seconds(calls, device), 2)

    return RouterTime(
        router=name,
        tokens=tokens,
        transformers_us=microseconds([partial(each, x) for each in modules]),
        kernels_us=microseconds([partial(each, x) for each in kernels]),
        product_us=microseconds([partial(backend.exact_linear, x, each.product) for each in routers]),
        choice_us=microseconds(
            [partial(backend.route, logits, each.routing, each.bias, each.dtype) for each in routers]
        ),
        rows_that_differ=int((theirs[2].sort(-1).values != ours[2].sort(-1).values).any(-1).sum()),
        weights_apart=float((theirs[1].sort(-1).values - ours[1].sort(-1).values).abs().max()),
        logits_apart=float((theirs[0] - ours[0]).abs().max()),
    )


if __name__ == "__main__":
    sys.exit(main())
