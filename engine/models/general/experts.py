"""Experts of transformers' models by kernels, where they are proved to compute the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from quire.engine.models.general.attention import NAME
from quire.engine.models.general.proof import alike
from quire.kernels.experts.experts import experts
from quire.kernels.experts.gating import gated_reference
from quire.kernels.experts.weights import Experts, Limited
from quire.kernels.pointwise.activation import ACTIVATIONS, Activation

MOST_LIMIT = 1e6  # beyond which nothing is limited
_TOKENS, _TOP = 4, 2  # of what is compared


def give_experts(model: nn.Module) -> None:
    """Have experts computed by kernels where they can be. Their weights stand in rows then."""
    for module in model.modules():
        found = experts_of(module)
        if found is not None and _is_same(module, found):
            module.quire_experts = found  # type: ignore[assignment]


def experts_of(module: Any) -> Experts | None:
    """Return a module's experts as kernels take them, if transformers keeps them in its usual way."""
    up: Any = getattr(module, "gate_up_proj", None)
    down: Any = getattr(module, "down_proj", None)
    if not all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in (up, down)):
        return None
    usual = getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", False)
    if not usual or not hasattr(module, "_apply_gate"):
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
    interleaved = not getattr(module, "is_concatenated", True)
    alpha = getattr(module, "alpha", None)
    limit = getattr(module, "limit", getattr(module, "swiglu_limit", None))
    names: list[Activation | Limited] = [*ACTIVATIONS]
    spread = 8.0
    if isinstance(limit, int | float) and 0 < limit < MOST_LIMIT:
        names += ["limited"] if alpha is None else ["clamped"]
        spread = max(spread, float(limit))  # so that it is seen to limit
    x = spread * torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    try:
        theirs = module._apply_gate(x.to(up.device)).cpu()
    except Exception:  # modelling code may want anything
        return None
    for name in names:
        found = Experts(
            gate_up=weights[0],
            down=weights[1],
            gate_up_bias=biases[0],
            down_bias=biases[1],
            interleaved=interleaved,
            activation=name,
            alpha=alpha or 0.0,
            limit=float(limit or 0.0),
        )
        first, second = (x[:, ::2], x[:, 1::2]) if interleaved else x.chunk(2, dim=1)
        if torch.allclose(gated_reference(first, second, found), theirs, rtol=1e-5, atol=1e-5):
            return found
    return None


def _is_same(module: nn.Module, found: Experts) -> bool:
    device = found.down.device
    generator = torch.Generator(device).manual_seed(2)
    x = torch.randn(_TOKENS, found.hidden, device=device, generator=generator).to(found.down.dtype)
    index = torch.randint(found.count, (_TOKENS, _TOP), device=device, generator=generator)
    weights = torch.rand(_TOKENS, _TOP, device=device, generator=generator).to(x.dtype)
    theirs = ALL_EXPERTS_FUNCTIONS["batched_mm"](module, x, index, weights)
    return alike(experts(x, index, weights, found), theirs)


def _run(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    found: Experts | None = getattr(module, "quire_experts", None)
    if found is None:
        grouped: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](
            module, hidden_states, top_k_index, top_k_weights
        )
        return grouped
    return experts(hidden_states, top_k_index, top_k_weights, found)


ALL_EXPERTS_FUNCTIONS.register(NAME, _run)
