"""Folders whose weights are 8-bit floats, made by plain torch, and folders of the numbers those stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.models.quantised_folder import save_twice

LARGEST = 448.0  # of torch.float8_e4m3fn


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
    powers: bool = False  # scales are exponents of 2, and bytes


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
    "rows of fbgemm": Form(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        1, 0, beside=("input_scale_ub",),
    ),
    "rows in vectors": Form(fp8(), 1, 0, dims=1),
    "compressed blocks": Form(compressed(strategy="block", block_structure=[48, 80]), 48, 80),
    "compressed matrices": Form(
        compressed(strategy="tensor"), 0, 0, dims=1, dtype=torch.bfloat16, beside=("input_scale",)
    ),
    "compressed matrices of old": Form(
        compressed() | {"format": "naive-quantized", "quantization_status": "frozen"}, 0, 0
    ),
    "compressed powers": Form(
        compressed(strategy="group", group_size=32) | {"format": "mxfp8-quantized"}, 1, 32, powers=True
    ),
    "compressed rows": Form(compressed(strategy="channel"), 1, 0, dtype=torch.bfloat16),
}  # fmt: skip


def quantise(weight: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Return 8-bit floats, scales, and the numbers that they stand for, of a matrix or a stack of them."""
    if weight.dim() > 2:
        floats, scales, numbers = zip(*(quantise(each, form) for each in weight), strict=True)
        return torch.stack(floats), torch.stack(scales), torch.stack(numbers)
    rows, columns = form.rows or len(weight), form.columns or weight.shape[1]
    padding = (0, -weight.shape[1] % columns, 0, -len(weight) % rows)
    blocks = pad(weight.abs(), padding).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scales = (blocks.amax((1, 3)) / LARGEST).to(form.dtype)
    if form.powers:
        scales = 2.0 ** scales.log2().ceil()
    scale = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    scale = scale[: len(weight), : weight.shape[1]]  # of each number
    floats = (weight / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    numbers = floats.float() * scale
    if form.powers:
        return floats, (scales.log2() + 127).to(torch.uint8), numbers
    return floats, scales.view(scales.shape if form.dims > 1 else (-1,) * form.dims), numbers


def save_quantised(
    kind: str, form: Form, folder: Path, sizes: dict[str, Any] | None = None
) -> tuple[Path, Path]:
    """Save a random model twice: with quantised weights, and with the numbers that those stand for."""

    def parts_of(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        floats, scales, numbers = quantise(weight, form)
        before = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
        beside = {before + other: torch.tensor(0.25) for other in form.beside}
        return {name: floats, name + form.scale: scales} | beside, numbers

    return save_twice(kind, form.config, parts_of, folder, sizes)
