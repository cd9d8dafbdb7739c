"""A run of a model's own code without numbers, which shows what it asks of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from quire.engine.models.general.attention import NAME, Attention, UnsupportedAttention, give
from quire.engine.models.general.host_reads import NothingFound
from quire.engine.models.general.positions import StepPositions

TOKENS = 3  # of the run


def build(config: PreTrainedConfig, auto: Any = AutoModelForCausalLM) -> Any:
    """Return the model that one of transformers' classes makes of a configuration, its parameters nowhere."""
    config._attn_implementation = NAME
    with torch.inference_mode(), torch.device("meta"):
        return auto.from_config(config, attn_implementation=NAME, experts_implementation="batched_mm")


def run_dry(model: Any, attention: Attention) -> StepPositions:
    """Have a model that `build` made call `attention`. Raises what its code raises."""
    with torch.inference_mode():
        give(model, attention)
        decoder: nn.Module | None = getattr(model, model.base_model_prefix, None)
        if decoder is None:
            raise UnsupportedAttention(f"it has no part {model.base_model_prefix!r}, which its class names")
        positions = StepPositions(decoder)
        tokens = torch.arange(TOKENS, device="meta")
        with NothingFound():  # experts of their own kind find no tokens
            model.eval()(input_ids=tokens[None], use_cache=False, **positions.begin(tokens))
    return positions
