"""Folders whose weights are 8-bit floats, made by plain torch, and folders of the numbers those stand for."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.any_model import save_tiny

LARGEST = 448.0  # of torch.float8_e4m3fn
NOT_QUANTISED = ("embed", "wte", "wpe", "lm_head", "gate.weight", "router", "_bias")
SIZES: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 288, "head_dim": 48}
MODELS: dict[str, dict[str, Any]] = {  # blocks of 128 end within matrices, and in the midst of a rank's share
    "llama": SIZES | {"tie_word_embeddings": True},
    "qwen3": SIZES,
    "mistral": SIZES,
    "opt": {"hidden_size": 160, "ffn_dim": 288, "word_embed_proj_dim": 160},
    "gpt2": {"n_embd": 160, "n_inner": 288},
    "gemma2": SIZES,
    "gemma3": {},  # with a configuration of its text inside
    "qwen3_moe": SIZES | {"moe_intermediate_size": 144},  # experts in files of their own
    "minimax_m2": SIZES,  # likewise, under other names
    "gpt_oss": SIZES,  # experts stacked
    "deepseek_v3": {"hidden_size": 160, "moe_intermediate_size": 144, "kv_lora_rank": 144},
}


@dataclass(frozen=True, slots=True)
class Form:
    """A way in which weights are 8-bit floats. rows, columns: that have a scale; 0: as many as there are."""

    config: dict[str, Any]
    rows: int
    columns: int
    scale: str = "_scale"  # behind the weight's name
    dims: int = 2  # of scales: fewer leave out those of one
    dtype: torch.dtype = torch.float32  # of scales
    beside: tuple[str, ...] = field(default=())  # other tensors beside a weight


def compressed(**weights: Any) -> dict[str, Any]:
    """Return a quantization_config as compressed-tensors writes it."""
    given = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "group_size": None}
    group = {
        "weights": given | weights,
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        "output_activations": None,
        "targets": ["Linear"],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }


def fp8(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic"} | fields


FORMS = {
    "blocks": Form(fp8(weight_block_size=[128, 128], fmt="float8_e4m3fn"), 128, 128, "_scale_inv"),
    "matrices": Form(
        fp8(activation_scheme="static", ignored_layers=["lm_head"]), 0, 0, dims=0, beside=("input_scale",)
    ),
    "matrices of Mistral": Form(
        fp8(activation_scheme="static", weight_block_size=None, modules_to_not_convert=["lm_head"]),
        0, 0, "_scale_inv", dims=0, dtype=torch.bfloat16, beside=("activation_scale",),
    ),
    "rows": Form(fp8(), 1, 0),
    "rows in vectors": Form(fp8(), 1, 0, dims=1),
    "compressed blocks": Form(compressed(strategy="block", block_structure=[48, 80]), 48, 80),
    "compressed matrices": Form(
        compressed(strategy="tensor"), 0, 0, dims=1, dtype=torch.bfloat16, beside=("input_scale",)
    ),
    "compressed matrices of old": Form(
        compressed() | {"format": "naive-quantized", "quantization_status": "frozen"}, 0, 0
    ),
    "compressed rows": Form(compressed(strategy="channel"), 1, 0, dtype=torch.bfloat16),
}  # fmt: skip


def is_quantised(name: str, weight: Tensor) -> bool:
    return weight.dim() > 1 and not any(part in name for part in NOT_QUANTISED)


def quantise(weight: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Return 8-bit floats, scales, and the numbers that they stand for, of a matrix or a stack of them."""
    if weight.dim() > 2:
        floats, scales, numbers = zip(*(quantise(each, form) for each in weight), strict=True)
        return torch.stack(floats), torch.stack(scales), torch.stack(numbers)
    rows, columns = form.rows or len(weight), form.columns or weight.shape[1]
    floats, numbers = weight.to(torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(-(-len(weight) // rows), -(-weight.shape[1] // columns), dtype=form.dtype)
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            at = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
            scales[row, column] = weight[at].abs().max() / LARGEST
            scale = scales[row, column].float()
            floats[at] = (weight[at] / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
            numbers[at] = floats[at].float() * scale
    return floats, scales.view(scales.shape if form.dims > 1 else (-1,) * form.dims), numbers


def configure(folder: Path, quantization_config: dict[str, Any], field: str = "quantization_config") -> None:
    """Put into a folder's config.json how its weights are quantised."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: quantization_config}))


def save_quantised(kind: str, form: Form, folder: Path) -> tuple[Path, Path]:
    """Save a random model twice: with quantised weights, and with the numbers that those stand for."""
    quantised, plain = folder / "quantised", folder / "plain"
    save_tiny(kind, quantised, **MODELS[kind])
    shutil.copytree(quantised, plain)
    held: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, weight in load_file(quantised / "model.safetensors").items():
        held[name] = meant[name] = weight
        if not is_quantised(name, weight):
            continue
        held[name], held[name + form.scale], meant[name] = quantise(weight, form)
        before = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
        held |= {before + other: torch.tensor(0.25) for other in form.beside}
    save_file(held, quantised / "model.safetensors", {"format": "pt"})
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    configure(quantised, form.config)
    return quantised, plain
