"""Rotary positions whose frequencies follow from the longest sequence of a call: settled once, at loading.

Transformers has a call's largest position choose them: of a step that computes many sequences one would
choose for all, and keys that the cache keeps would have been turned by others than those of now.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

logger = logging.getLogger("quire.engine")


def settle(model: nn.Module, max_model_len: int) -> None:
    """Have each rotary module turn by what it uses for sequences of `max_model_len` tokens.

    `dynamic` stretches nothing up to the positions that a model has, which none here exceeds. `longrope` has
    factors up to the length of its training, and others beyond it.
    """
    found = {length for module in model.modules() for length in _settle(module, max_model_len)}
    if found:
        logger.warning(
            "The model's rotary positions have factors for sequences of more than %d tokens, which all get: "
            "--max-model-len %d serves shorter ones by theirs",
            min(found),
            min(found),
        )


def _settle(module: Any, max_model_len: int) -> list[int]:
    """Settle one module; return beyond which lengths it has other factors than for shorter sequences."""
    kinds = getattr(module, "rope_type", None)
    named = kinds if isinstance(kinds, dict) else {"": kinds}  # by kind of layer
    if not {"dynamic", "longrope"} & set(named.values()):
        return []
    lengths = [
        length
        for layers, kind in named.items()
        if kind == "longrope"
        for length in _settle_longrope(module, layers, max_model_len)
    ]
    still = {layers: "default" if kind in ("dynamic", "longrope") else kind for layers, kind in named.items()}
    module.rope_type = still if isinstance(kinds, dict) else still[""]
    return lengths


def _settle_longrope(module: Any, layers: str, max_model_len: int) -> list[int]:
    parameters = module.config.rope_parameters
    trained: int = (parameters[layers] if layers else parameters)["original_max_position_embeddings"]
    is_long = max_model_len > trained
    if isinstance(module, PhimoeRotaryEmbedding):
        # Its factors are always those of short sequences, but what it scales by is not.
        module.attention_scaling = parameters["long_mscale" if is_long else "short_mscale"]
        module.__class__ = _SettledPhimoe
    elif is_long:
        given = {"layer_type": layers} if layers else {}
        frequencies: Tensor = getattr(module, f"{layers}_inv_freq" if layers else "inv_freq")
        factors, _ = ROPE_INIT_FUNCTIONS["longrope"](
            module.config, frequencies.device, seq_len=trained + 1, **given
        )
        frequencies.copy_(factors)
    return [trained] if is_long else []


class _SettledPhimoe(PhimoeRotaryEmbedding):
    """Scales by what it has been given, whatever the positions."""

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)
