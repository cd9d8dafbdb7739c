"""Configurations of quantised models, as if they were not."""

from __future__ import annotations

from transformers import PreTrainedConfig


def without(config: PreTrainedConfig) -> PreTrainedConfig:
    """Take away what a configuration says of quantised weights, so that transformers' loader expects none."""
    for part in (config, config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config"):
            if hasattr(part, name):
                delattr(part, name)
    return config
