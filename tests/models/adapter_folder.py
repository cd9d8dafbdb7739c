"""Folders of adapters, as PEFT writes them, beside those of the models that they make."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

RANK, ALPHA = 4, 6
SCALE = ALPHA / RANK


def drawn(*shape: int) -> Tensor:
    """Return the same numbers for a shape, each time."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * 0.2


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def save_adapter(folder: Path, tensors: dict[str, Tensor], base: Path | str = "base", **fields: Any) -> Path:
    """Save an adapter of tensors, by the names that they have in the model."""
    folder.mkdir(exist_ok=True)
    config = {
        "base_model_name_or_path": str(base), "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "lora_alpha": ALPHA, "lora_dropout": 0.1, "modules_to_save": None,
        "peft_type": "LORA", "r": RANK, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM",
        "use_dora": False, "use_rslora": False,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config | fields), encoding="utf-8")
    named = {
        f"base_model.model.{name}": tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def save_changed(base: Path, folder: Path, changed: dict[str, Tensor], **fields: Any) -> Path:
    """Save the base model with other weights of some names, and other fields of its config.json."""
    shutil.copytree(base, folder)
    save_file(
        {
            name: each.clone(memory_format=torch.contiguous_format)
            for name, each in (weights(base) | changed).items()
        },
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def lora_of(module: str, outputs: int, inputs: int, rank: int = RANK) -> dict[str, Tensor]:
    """Return the two matrices that are added to those of a linear layer."""
    return {
        f"{module}.lora_A.weight": drawn(rank, inputs),
        f"{module}.lora_B.weight": drawn(outputs, rank),
    }


def delta_of(tensors: dict[str, Tensor], module: str, scale: float = SCALE) -> Tensor:
    """Return what they add [outputs, inputs]."""
    return tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"] * scale


def is_linear(name: str, weight: Tensor) -> bool:
    return weight.dim() == 2 and not any(part in name for part in ("embed", "wte", "wpe", "lm_head"))


def save_both(base: Path, folder: Path, *, inputs_first: bool = False, **fields: Any) -> tuple[Path, Path]:
    """Save an adapter of all linear layers, and what it makes of the base model.

    inputs_first: weights are [inputs, outputs].
    """
    tensors: dict[str, Tensor] = {}
    changed: dict[str, Tensor] = {}
    for name, weight in weights(base).items():
        if is_linear(name, weight):
            module = name.removesuffix(".weight")
            outputs, inputs = weight.shape[::-1] if inputs_first else weight.shape
            tensors |= lora_of(module, outputs, inputs)
            delta = delta_of(tensors, module)
            changed[name] = weight + (delta.T if inputs_first else delta)
    adapter = save_adapter(folder / "adapter", tensors, base, **fields)
    return adapter, save_changed(base, folder / "merged", changed)
