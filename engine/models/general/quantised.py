"""Weights that a folder has in a few bits each: loaded as the numbers that they stand for, or refused."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.utils.quantization_config import Mxfp4Config

_EXPANDED = {"mxfp4": Mxfp4Config}  # gpt-oss's; transformers makes bf16 of them


def method_of(config: PreTrainedConfig) -> str:
    """Return by which method the weights are quantised; "" if they are not."""
    given = getattr(config, "quantization_config", None)
    if not given:
        return ""
    fields = given if isinstance(given, dict) else given.to_dict()
    return str(fields.get("quant_method", "of no name"))


def is_expanded(method: str) -> bool:
    """Return whether the numbers that weights stand for can be loaded."""
    return method in _EXPANDED


def expanding(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what `from_pretrained` takes besides, so that it loads those numbers."""
    method = method_of(config)
    return {"quantization_config": _EXPANDED[method](dequantize=True)} if method else {}
