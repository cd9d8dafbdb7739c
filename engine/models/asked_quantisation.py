"""What `--quantization` asks of a model: nothing that its files do not have, or that weights are rounded.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.engine.models.config import ModelConfig
from quire.engine.models.float8 import MXFP8
from quire.engine.models.json_fields import read_json
from quire.engine.models.modelopt import MODELOPT, MODELOPT_NVFP4, with_modelopt
from quire.engine.models.quantisation import ROUNDED, Measured, weights_of
from quire.engine.models.quantisation_config import method_of

ROUNDS = "fp8"  # the method by which weights that are not quantised are rounded as they are loaded
_BY_VLLM = {  # what vLLM calls methods, beside their names in a config.json
    "gptq": ("gptq_marlin", "moe_wna16"),
    "awq": ("awq_marlin", "moe_wna16"),
    "auto-round": ("auto_round", "inc"),
    "intel/auto-round": ("auto-round", "auto_round", "inc"),
}


def with_quantization(config: ModelConfig, folder: Path, asked: str) -> ModelConfig:
    """Return a folder's model as `--quantization` asks for it; `config` is without an adapter.

    Raises ValueError for a method that is not the one of its files, and for what cannot be rounded.
    """
    method = method_of(with_modelopt(folder, read_json(folder / "config.json") or {}))
    if method and asked in _names_of(method, config):
        return config
    if weights_of(config.quantised) is not None:
        raise ValueError(
            f"--quantization {asked}: weights of {folder} are quantised by the method {method!r}, and are "
            f"not quantised anew: give --quantization {method}, or leave it out"
        )
    if asked != ROUNDS:
        raise ValueError(
            f"--quantization {asked}: weights of {folder} are not quantised, and {ROUNDS} is the only method "
            f"by which they are as they are loaded: give --quantization {ROUNDS}, a folder that is quantised "
            "by that method, or leave it out"
        )
    if not may_round(config):
        raise ValueError(
            f"--quantization {ROUNDS}: of native decoders weights are rounded of Llama, Mistral, Qwen2 and "
            f"Qwen3, and {config.architecture} runs with learned positions: leave it out"
        )
    if config.implementation == "transformers":
        from quire.engine.models.general.rounded_parts import rounds_any  # transformers takes seconds

        if not rounds_any(folder, config):
            raise ValueError(
                f"--quantization {ROUNDS}: weights are rounded of linear layers and of experts, and "
                f"{config.architecture} has none of these that kernels have in 8 bits: leave it out"
            )
    if isinstance(config.quantised, Measured):
        return replace(config, quantised=replace(config.quantised, weights=ROUNDED))
    return replace(config, quantised=ROUNDED)


def may_round(config: ModelConfig) -> bool:
    """Tell whether weights of a model can be rounded as they are loaded."""
    decodes = config.implementation == "transformers" or config.rope is not None  # see `decoder.Decoder`
    return decodes and weights_of(config.quantised) is None


def _names_of(method: str, config: ModelConfig) -> tuple[str, ...]:
    """Return what a method is called."""
    if method == MODELOPT and weights_of(config.quantised) == MODELOPT_NVFP4:
        return MODELOPT, "modelopt_fp4"
    if method == MODELOPT and weights_of(config.quantised) == MXFP8:
        return MODELOPT, "modelopt_mxfp8"
    return method, *_BY_VLLM.get(method, ())
