"""A run of a model's own code without numbers, which shows what it asks of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from quire.engine.models.config import ModelConfig
from quire.engine.models.general.attention import NAME, Attention, give
from quire.engine.models.general.host_reads import NothingFound
from quire.engine.models.general.latent import give_latents
from quire.engine.models.general.own_attention import adapt, register_classes
from quire.engine.models.general.positions import StepPositions
from quire.engine.models.general.rotary import settle
from quire.engine.models.general.unsupported import UnsupportedAttention

TOKENS = 3  # of the run


def auto_of(config: ModelConfig) -> Any:
    """Return which of transformers' automatic classes makes a model: with a head of labels, or for text."""
    labels = config.pooling is not None and config.pooling.labels
    return AutoModelForSequenceClassification if labels else AutoModelForCausalLM


def build(config: PreTrainedConfig, auto: Any = AutoModelForCausalLM) -> Any:
    """Return the model that one of transformers' classes makes of a configuration, its parameters nowhere."""
    config._attn_implementation = NAME
    register_classes(config.model_type)
    with torch.inference_mode(), torch.device("meta"):
        model = auto.from_config(config, attn_implementation=NAME, experts_implementation="batched_mm")
    adapt(model)
    settle(model, TOKENS)
    give_latents(model)
    return model


def run_dry(model: Any, attention: Attention) -> tuple[StepPositions, int]:
    """Have a model that `build` made call `attention`; return of how many tokens it gives logits, too.

    Raises what its code raises.
    """
    with torch.inference_mode():
        give(model, attention)
        positions = StepPositions(getattr(model, decoder_name(model)))
        tokens = torch.arange(TOKENS, device="meta")
        with NothingFound():  # experts of their own kind find no tokens
            output = model.eval()(input_ids=tokens[None], use_cache=False, **positions.begin(tokens))
    return positions, int(output.logits.shape[-1])


def decoder_name(causal: Any) -> str:
    """Return under which name a causal model has its decoder. Raises UnsupportedAttention."""
    for name in (causal.base_model_prefix, "model"):  # Llama 4's class names a part that it has not
        if isinstance(getattr(causal, name, None), nn.Module):
            return str(name)
    raise UnsupportedAttention(f"it has no part {causal.base_model_prefix!r}, which its class names")
