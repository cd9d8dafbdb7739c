"""Folders of a random model, and the same with weights of layers rounded to 8-bit floats by plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.adapter_folder import save_changed
from tests.models.any_model import save_tiny
from tests.models.kept_folder import SIZES

LARGEST = 448.0  # of torch.float8_e4m3fn


def rounded(weight: Tensor) -> Tensor:
    """Return a weight with each row's largest at the largest 8-bit float, and others at the nearest."""
    scales = weight.float().abs().amax(1, keepdim=True) / LARGEST
    return (weight.float() / scales).to(torch.float8_e4m3fn).float() * scales


def is_rounded(name: str) -> bool:
    return name.endswith("_proj.weight")


def rounded_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a folder's layers, rounded."""
    tensors = load_file(folder / "model.safetensors")
    return {name: rounded(each) for name, each in tensors.items() if is_rounded(name)}


def save_plain(
    kind: str, folder: Path, dtype: torch.dtype = torch.float32, **sizes: Any
) -> tuple[Path, Path]:
    """Return two folders: of weights in a dtype, and of what becomes of them, in fp32."""
    plain = folder / "plain"
    save_tiny(kind, plain, **(SIZES | sizes))
    tensors = {name: each.to(dtype) for name, each in load_file(plain / "model.safetensors").items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    return plain, save_changed(plain, folder / "rounded", rounded_weights(plain))


def is_rounded_by_transformers(name: str, weight: Tensor) -> bool:
    """Tell whether a weight is rounded of a model by transformers' code: linear layers', experts'."""
    stays = ("mlp.gate.weight", "shared_expert_gate.weight", "kv_b_proj.weight")
    return ".layers." in name and weight.dim() == 2 and len(weight) % 16 == 0 and not name.endswith(stays)


def save_general(kind: str, folder: Path, **sizes: Any) -> tuple[Path, Path]:
    """Return two folders of a model by transformers' code: of weights, and of what becomes of them."""
    plain = folder / "plain"
    save_tiny(kind, plain, **sizes)
    tensors = load_file(plain / "model.safetensors")
    changed = {
        name: rounded(each) for name, each in tensors.items() if is_rounded_by_transformers(name, each)
    }
    return plain, save_changed(plain, folder / "rounded", changed)
