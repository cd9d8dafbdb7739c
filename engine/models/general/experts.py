"""Experts of transformers' models by kernels, where they are proved to compute the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from quire.engine.models.general.attention import NAME
from quire.engine.models.general.expert_modules import bare_of
from quire.engine.models.general.proof import alike
from quire.kernels.experts.experts import experts
from quire.kernels.experts.quantised import QuantisedExperts
from quire.kernels.experts.quantised_experts import quantised_experts
from quire.kernels.experts.weights import Experts

_TOKENS, _TOP = 4, 2  # of what is compared


def give_experts(model: nn.Module) -> None:
    """Have experts computed by kernels where they can be. Their weights stand in rows then."""
    for module in model.modules():
        found = experts_of(module)
        if found is not None and computes(module, found):
            module.quire_experts = found  # type: ignore[assignment]


def experts_of(module: Any) -> Experts | None:
    """Return a module's experts as kernels take them, if transformers keeps them in its usual way."""
    up: Any = getattr(module, "gate_up_proj", None)
    down: Any = getattr(module, "down_proj", None)
    if not all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in (up, down)):
        return None
    found = bare_of(module, up.device)
    if found is None:
        return None
    if module.is_transposed:
        for weight in (up, down):
            weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
            if weight.is_cuda:
                torch.cuda.empty_cache()
    weights = [weight.data.transpose(1, 2) if module.is_transposed else weight.data for weight in (up, down)]
    biases: list[Tensor | None] = [None, None]
    if module.has_bias:
        biases = [module.gate_up_proj_bias.data, module.down_proj_bias.data]
    return replace(found, gate_up=weights[0], down=weights[1], gate_up_bias=biases[0], down_bias=biases[1])


def computes(module: nn.Module, found: Experts) -> bool:
    """Tell whether kernels give of experts what transformers' code does, which takes the module's weights."""
    given = _asked(found, found.down.dtype, found.down.device)
    return alike(_computed(*given, found), ALL_EXPERTS_FUNCTIONS["batched_mm"](module, *given))


def computes_quantised(module: nn.Module, found: QuantisedExperts, dtype: torch.dtype) -> bool:
    """Tell whether kernels give of tokens in a dtype what transformers' code gives of the same in fp32.

    module: with the numbers in fp32 that the weights stand for. So kernels' own roundings alone are allowed
    for, and not those of the module's code as well.
    """
    x, index, weights = _asked(found, dtype, found.down.device)
    each = zip(x.float().split(1), index.split(1), weights.float().split(1), strict=True)
    # One token after the other: of each expert that it asks for a copy is made.
    theirs = torch.cat([ALL_EXPERTS_FUNCTIONS["batched_mm"](module, *given) for given in each])
    return alike(_computed(x, index, weights, found), theirs.to(dtype))


def _asked(
    found: Experts | QuantisedExperts, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, the experts that they ask for, and what these are multiplied by."""
    generator = torch.Generator(device).manual_seed(2)
    x = torch.randn(_TOKENS, found.hidden, device=device, generator=generator).to(dtype)
    index = torch.randint(found.count, (_TOKENS, _TOP), device=device, generator=generator)
    weights = torch.rand(_TOKENS, _TOP, device=device, generator=generator).to(dtype)
    return x, index, weights


def _computed(x: Tensor, index: Tensor, weights: Tensor, found: Experts | QuantisedExperts) -> Tensor:
    if isinstance(found, QuantisedExperts):
        return quantised_experts(x, index, weights, found)
    return experts(x, index, weights, found)


def _run(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    found: Experts | QuantisedExperts | None = getattr(module, "quire_experts", None)
    if found is None:
        grouped: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](
            module, hidden_states, top_k_index, top_k_weights
        )
        return grouped
    return _computed(hidden_states, top_k_index, top_k_weights, found)


ALL_EXPERTS_FUNCTIONS.register(NAME, _run)
