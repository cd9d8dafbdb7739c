"""Folders of random models whose weights are quantised, beside the same with the numbers those stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.any_model import save_tiny

# Of a weight's name and itself: the tensors that files have of it, and the numbers that those stand for.
Quantise: TypeAlias = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
NOT_QUANTISED = ("embed", "wte", "wpe", "lm_head", "gate.weight", "router", "_bias", "conv1d")
LAYERS = 2  # one of each type where there are two
SIZES: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 288, "head_dim": 48}
SIZES |= {"num_hidden_layers": LAYERS}
MODELS: dict[str, dict[str, Any]] = {  # blocks of 128 end within matrices, and in the midst of a rank's share
    "llama": SIZES | {"tie_word_embeddings": True},
    "qwen3": SIZES,
    "mistral": SIZES,
    "opt": {"hidden_size": 160, "ffn_dim": 288, "word_embed_proj_dim": 160, "num_hidden_layers": LAYERS},
    "gpt2": {"n_embd": 160, "n_inner": 288, "n_layer": LAYERS},
    "gemma2": SIZES,
    "gemma3": {},  # with a configuration of its text inside
    "qwen3_moe": SIZES | {"moe_intermediate_size": 144},  # experts in files of their own
    "minimax_m2": SIZES,  # likewise, under other names
    "gpt_oss": SIZES,  # experts stacked
    "deepseek_v3": {
        "hidden_size": 160,
        "moe_intermediate_size": 144,
        "kv_lora_rank": 144,
        "num_hidden_layers": LAYERS,
    },
}


def is_quantised(name: str, weight: Tensor) -> bool:
    return weight.dim() > 1 and not any(part in name for part in NOT_QUANTISED)


def configure(folder: Path, quantization_config: dict[str, Any], field: str = "quantization_config") -> None:
    """Put into a folder's config.json how its weights are quantised."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: quantization_config}))


def save_twice(
    kind: str,
    config: dict[str, Any],
    quantise: Quantise,
    folder: Path,
    sizes: dict[str, Any] | None = None,
) -> tuple[Path, Path]:
    """Save a random model with quantised weights and a quantization_config, and with their numbers.

    sizes: in place of those of `MODELS`.
    """
    quantised, plain = folder / "quantised", folder / "plain"
    save_tiny(kind, quantised, **(sizes or MODELS[kind]))
    shutil.copytree(quantised, plain)
    held: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, weight in load_file(quantised / "model.safetensors").items():
        if is_quantised(name, weight):
            parts, meant[name] = quantise(name, weight)
            held |= parts
        else:
            held[name] = meant[name] = weight
    save_file(held, quantised / "model.safetensors", {"format": "pt"})
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    configure(quantised, config)
    return quantised, plain
