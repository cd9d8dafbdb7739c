"""Modules that are all experts of a layer, as transformers keeps them in its usual way: what they compute."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from quire.kernels.experts.gating import gated_reference
from quire.kernels.experts.weights import Experts, Limited
from quire.kernels.pointwise.activation import ACTIVATIONS, Activation

GATE_UP, DOWN = "gate_up_proj", "down_proj"  # as they call the weights of all experts
MOST_LIMIT = 1e6  # beyond which nothing is limited


def bare_of(module: Any, device: torch.device) -> Experts | None:
    """Return what a module's experts do, without any weights, if it is of transformers' usual kind."""
    usual = getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", False)
    if not usual or not hasattr(module, "_apply_gate"):
        return None
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
        theirs = module._apply_gate(x.to(device)).cpu()
    except Exception:  # modelling code may want anything
        return None
    none = torch.empty(0)
    for name in names:
        found = Experts(
            none,
            none,
            interleaved=interleaved,
            activation=name,
            alpha=alpha or 0.0,
            limit=float(limit or 0.0),
        )
        first, second = (x[:, ::2], x[:, 1::2]) if interleaved else x.chunk(2, dim=1)
        if torch.allclose(gated_reference(first, second, found), theirs, rtol=1e-5, atol=1e-5):
            return found
    return None


def kind_of(module: Any) -> Hashable:
    """Return what tells modules apart that compute otherwise: their class, and what `bare_of` finds."""
    bare = bare_of(module, torch.device("cpu"))
    if bare is None:
        return None
    layout = module.is_transposed, module.has_bias, bare.interleaved
    return type(module), layout, bare.activation, bare.alpha, bare.limit


def matrices_of(module: Any) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of an expert's matrices, by the weights' names; none without a gate."""
    if not module.has_gate:
        return {}
    shapes = {name: tuple(getattr(module, name).shape[1:]) for name in (GATE_UP, DOWN)}
    return {name: shape[::-1] if module.is_transposed else shape for name, shape in shapes.items()}
