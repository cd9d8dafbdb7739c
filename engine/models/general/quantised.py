"""Weights of a few bits that transformers' loader makes numbers of: MXFP4, as gpt-oss has it."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.utils.quantization_config import Mxfp4Config

MXFP4 = "mxfp4"


def expanding(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what `from_pretrained` takes besides, so that it loads those numbers."""
    given = getattr(config, "quantization_config", None)
    return {"quantization_config": Mxfp4Config(dequantize=True)} if given else {}


def without(config: PreTrainedConfig) -> PreTrainedConfig:
    """Take away what a configuration says of quantised weights, so that transformers' loader expects none."""
    for part in (config, config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config"):
            if hasattr(part, name):
                delattr(part, name)
    return config
