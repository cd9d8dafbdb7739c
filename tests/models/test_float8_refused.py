"""Folders whose quantised weights are not what is loaded are refused, by the name of what is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.models.float8 import Float8
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.kernels.backend import torch_backend
from tests.models.any_model import save_tiny
from tests.models.float8_folder import FORMS, compressed, fp8, save_quantised
from tests.models.quantised_folder import configure

Edit = Callable[[dict[str, Tensor]], object]
QUERIES = "model.layers.0.self_attn.q_proj.weight"  # [192, 160]
NORM = "model.norm.weight"
SCALES = f"{QUERIES}_scale_inv"  # of blocks of 128, [2, 2]


def grouped(fields: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a quantization_config with other fields of its group's weights."""
    group = fields["config_groups"]["group_0"]
    return fields | {"config_groups": {"group_0": group | {"weights": group["weights"] | changes}}}


def load(folder: Path, dtype: torch.dtype) -> None:
    load_model(folder, read_model(folder), torch_backend(), device="cpu", dtype=dtype, max_model_len=64)


CHANNEL = compressed(strategy="channel")
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
REFUSED: dict[str, dict[str, Any]] = {
    "the method 'torchao'": {"quant_method": "torchao"},
    "the method 'quark'": {"quant_method": "quark"},
    "weight_block_size [128]": fp8(weight_block_size=[128]),
    "weight_block_size [128, 0]": fp8(weight_block_size=[128, 0]),
    "no config_groups": compressed() | {"config_groups": {}},
    "group_0: no weights": compressed() | {"config_groups": {"group_0": {"weights": None}}},
    "group_1: no weights": compressed() | {"config_groups": {"group_1": "FP8"}},
    "the format 'pack-quantized'": CHANNEL | {"format": "pack-quantized"},
    "group_0: weights of 8 bits in groups of 64": grouped(
        CHANNEL | {"format": "mxfp8-quantized"}, strategy="group", group_size=64
    ),
    "group_0: weights of 8 bits in groups of None": CHANNEL | {"format": "nvfp4-pack-quantized"},
    "the format 'mixed-precision'": CHANNEL | {"format": "mixed-precision"},
    "the format 'int-quantized'": CHANNEL | {"format": "int-quantized"},
    "the format 'sparse-24-bitmask'": CHANNEL | {"sparsity_config": {"format": "sparse-24-bitmask"}},
    "a transform_config": CHANNEL | {"transform_config": {"config_groups": {"R1": {}}}},
    "weights of 4 bits and the type 'float'": grouped(CHANNEL, num_bits=4),
    "the format 'float-quantized'": grouped(CHANNEL, **INT4),
    "group_1: weights of 4 bits and the type 'int'": CHANNEL
    | {"config_groups": CHANNEL["config_groups"] | {"group_1": {"weights": INT4}}},
    "weights with zero points": grouped(CHANNEL, symmetric=False),
    "the strategy 'group'": grouped(CHANNEL, strategy="group", group_size=128),
    "group_0: the strategy 'group'": grouped(CHANNEL, strategy=None, group_size=128),
    "block_structure None": grouped(CHANNEL, strategy="block"),
    "blocks of different sizes, [[64, 64], [128, 128]]": CHANNEL
    | {
        "config_groups": {
            size: {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": size}}
            for size in ("128x128", "64x64")
        }
    },
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_other_quantised_weights_are_refused_by_name(kind: str, what: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    configure(tmp_path, REFUSED[what])
    with pytest.raises(ValueError, match="quantization_config has .*" + re.escape(what)):
        read_model(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_a_compression_config_says_as_much(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    configure(tmp_path, grouped(CHANNEL, num_bits=4), "compression_config")
    with pytest.raises(ValueError, match="weights of 4 bits and the type 'float'"):
        read_model(tmp_path)
    configure(tmp_path, CHANNEL, "compression_config")
    assert read_model(tmp_path).quantised == Float8(row=True)


def of(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def with_bits(bits: int) -> Callable[[Tensor], Tensor]:
    """Return what sets the number in the last row and column to those bits."""

    def change(floats: Tensor) -> Tensor:
        floats.view(torch.uint8)[-1, -1] = bits
        return floats

    return change


WRONG: list[tuple[str, Edit, str]] = [
    ("blocks", lambda t: t.pop(SCALES), f"{QUERIES} is of 8-bit floats, and neither"),
    ("blocks", lambda t: t.update({f"{QUERIES}_scale": torch.ones(2, 2)}), f"both {SCALES} and"),
    (
        "blocks",
        of(SCALES, lambda scales: scales[:1]),
        f"{SCALES} has shape [1, 2], which quantization_config does not have",
    ),
    ("blocks", of(SCALES, lambda scales: scales[0, 0].clone()), "_scale_inv has shape []"),
    ("compressed powers", of(f"{QUERIES}_scale", Tensor.float), "_scale holds F32; scales may be U8"),
    (
        "compressed powers",
        of(f"{QUERIES}_scale", lambda each: each.fill_(255)),
        "numbers that are not finite",
    ),
    ("rows", of(f"{QUERIES}_scale", lambda scales: scales[:-1]), f"{QUERIES}_scale has shape [191, 1]"),
    ("matrices", of(f"{QUERIES}_scale", lambda scale: scale.expand(3).clone()), "_scale has shape [3]"),
    ("compressed rows", of(f"{QUERIES}_scale", lambda scales: scales[0]), f"{QUERIES}_scale has shape [1]"),
    (
        "compressed matrices",
        of(f"{QUERIES}_scale", lambda scale: scale.expand(192, 1).clone()),
        "shape [192, 1]",
    ),
    ("blocks", of(SCALES, Tensor.byte), f"{SCALES} holds U8; scales may be F32"),
    ("blocks", of(QUERIES, lambda floats: floats.view(torch.float8_e5m2)), f"{QUERIES} holds F8_E5M2"),
    ("blocks", of(QUERIES, lambda floats: floats.float()), f"{SCALES} is no weight of"),
    (
        "blocks",
        lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}),
        "k_scale is no weight",
    ),
    (
        "blocks",
        of(NORM, lambda norm: norm.to(torch.float8_e4m3fn)),
        f"{NORM} is of 8-bit floats",
    ),
    (
        "matrices",
        lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn), f"{NORM}_scale": torch.tensor(1.0)}),
        f"{NORM}_scale has shape []",
    ),
    ("blocks", of(QUERIES, with_bits(0x7F)), f"{QUERIES} stands for numbers that are not finite"),
    ("rows", of(QUERIES, with_bits(0xFF)), f"{QUERIES} stands for numbers that are not finite"),
    (
        "blocks",
        of(SCALES, lambda scales: scales * torch.inf),
        f"{QUERIES} stands for numbers that are not finite",
    ),
    (
        "blocks",
        lambda t: [t.pop(QUERIES), t.pop(SCALES)],
        f"{QUERIES} is missing",
    ),
]


@pytest.mark.parametrize(("form", "edit", "told"), WRONG)
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_wrong_tensors_are_refused_by_name(
    kind: str, form: str, edit: Edit, told: str, tmp_path: Path
) -> None:
    quantised, _ = save_quantised(kind, FORMS[form], tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    edit(tensors)
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(told)):
        load(quantised, torch.float32)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_numbers_that_are_too_large_for_the_dtype_are_refused(kind: str, tmp_path: Path) -> None:
    quantised, _ = save_quantised(kind, FORMS["blocks"], tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    tensors[SCALES] *= 65504 / 448 / tensors[SCALES].max()
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    load(quantised, torch.float16)
    tensors[SCALES] *= 1.01
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"{QUERIES} stands for numbers that are not finite"):
        load(quantised, torch.float16)
