"""Folders whose weights are packed integers, made by plain torch, and folders of their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.quantised_folder import save_twice

AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word, from the lowest bits on


@dataclass(frozen=True, slots=True)
class Form:
    """A way in which weights are packed integers. group: inputs that have a scale; 0: all.

    left_over: words have bits left over at their ends, as compressed-tensors once wrote them.
    """

    config: dict[str, Any]
    names: str  # gptq, awq, or the format of compressed-tensors
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    ordered: bool = False  # groups of inputs that do not stand beside each other
    scale_dtype: torch.dtype = torch.float16
    left_over: bool = False


def gptq(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True} | fields


def awq(**fields: Any) -> dict[str, Any]:
    given = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return given | fields


def auto_round(packing: str, **fields: Any) -> dict[str, Any]:
    given = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}
    return given | {"packing_format": packing, "autoround_version": "0.8.0"} | fields


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Return a quantization_config as compressed-tensors writes it for integers."""
    given = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, "group_size": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"weights": given | weights, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


FORMS = {
    "gptq": Form(gptq(), "gptq", symmetric=True),
    "gptq in act order": Form(gptq(desc_act=True, sym=False), "gptq", ordered=True),
    "gptq, 8 bits, a group": Form(gptq(bits=8, group_size=-1), "gptq", bits=8, group=0, symmetric=True),
    "gptq, 2 bits": Form(gptq(bits=2, format="gptq", method="gptq"), "gptq", bits=2),
    "gptq, 3 bits": Form(gptq(bits=3), "gptq", bits=3, symmetric=True),
    "gptq, 3 bits in act order": Form(
        gptq(bits=3, desc_act=True, sym=False), "gptq", bits=3, ordered=True
    ),
    "gptq v2": Form(gptq(checkpoint_format="gptq_v2", sym=False), "gptq_v2"),
    "awq": Form(awq(), "awq"),
    "awq, a group": Form(awq(group_size=-1), "awq", group=0),
    "awq in rows": Form(awq(version="gemv"), "awq_rows"),
    "awq in rows of GPTQModel": Form(awq(version=None, format="gemv", group_size=64), "awq_rows", group=64),
    "awq in rows, a group": Form(awq(version="GEMV", group_size=-1), "awq_rows", group=0),
    "auto-round": Form(auto_round("auto_round"), "gptq_v2"),
    "auto-round as gptq": Form(auto_round("auto_round:auto_gptq"), "gptq"),
    "auto-round as gptq of old": Form(
        auto_round("auto_round:gptq", quant_method="intel/auto-round", bits=2), "gptq", bits=2
    ),
    "auto-round, 3 bits": Form(auto_round("auto_round:gptqmodel", bits=3), "gptq_v2", bits=3),
    "auto-round, 5 bits": Form(auto_round("auto_round:auto_gptq", bits=5), "gptq", bits=5),
    "auto-round as awq": Form(auto_round("auto_round:auto_awq"), "awq"),
    "auto-round as awq, the other name": Form(auto_round("auto_round:awq", group_size=-1), "awq", group=0),
    "packed groups": Form(
        compressed("pack-quantized", strategy="group", group_size=32), "pack-quantized", symmetric=True,
        scale_dtype=torch.bfloat16,
    ),
    "packed groups in act order": Form(
        compressed("pack-quantized", strategy="group", group_size=32, actorder="group"), "pack-quantized",
        symmetric=True, ordered=True,
    ),
    "packed groups with zero points": Form(
        compressed("pack-quantized", strategy="group", group_size=32, symmetric=False), "pack-quantized",
    ),
    "packed groups of 3 bits with zero points": Form(
        compressed("pack-quantized", strategy="group", group_size=32, num_bits=3, symmetric=False),
        "pack-quantized", bits=3,
    ),
    "packed groups of 3 bits, words not full": Form(
        compressed("pack-quantized", strategy="group", group_size=32, num_bits=3, symmetric=False),
        "pack-quantized", bits=3, left_over=True,
    ),
    "packed rows of 6 bits": Form(
        compressed("pack-quantized", strategy="channel", num_bits=6), "pack-quantized", bits=6, group=0,
        symmetric=True,
    ),
    "packed rows of 8 bits": Form(
        compressed("pack-quantized", strategy="channel", num_bits=8), "pack-quantized", bits=8, group=0,
        symmetric=True,
    ),
    "bytes": Form(
        compressed("int-quantized", strategy="channel", num_bits=8), "int-quantized", bits=8, group=0,
        symmetric=True, scale_dtype=torch.float32,
    ),
    "bytes with zero points": Form(
        compressed("int-quantized", strategy="channel", num_bits=8, symmetric=False), "int-quantized",
        bits=8, group=0,
    ),
}  # fmt: skip


def quantise(weight: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return integers from 0 on, zero points, scales and each input's group, and the numbers that all mean.

    weight and integers are [outputs, inputs], zero points and scales [outputs, groups].
    """
    inputs, largest = weight.shape[1], 2**form.bits - 1
    size = form.group or inputs
    of_inputs = torch.arange(inputs) // size
    if form.ordered:
        of_inputs = of_inputs[torch.randperm(inputs)]
    count = -(-inputs // size)
    scales = torch.empty(len(weight), count, dtype=form.scale_dtype)
    zeros = torch.full((len(weight), count), (largest + 1) // 2)
    for group in range(count):
        some = weight[:, of_inputs == group]
        if form.symmetric:
            scales[:, group] = some.abs().amax(1) / (largest / 2)
        else:
            low, high = some.amin(1).clamp(max=0), some.amax(1).clamp(min=0)
            scales[:, group] = (high - low) / largest
            zeros[:, group] = (-low / scales[:, group].float()).round().clamp(1, largest)
    scale, zero = scales.float()[:, of_inputs], zeros[:, of_inputs]
    integers = (weight / scale + zero).round().clamp(0, largest).long()
    return integers, zeros, scales, of_inputs, (integers - zero) * scale


def packed(values: Tensor, bits: int, dim: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Return words of 32 bits with the values of a matrix along `dim`, the first in the lowest bits.

    A word has as many as fit whole.
    """
    if dim == 0:
        return packed(values.T, bits, 1, places).T.contiguous()
    count = 32 // bits
    padded = F.pad(values, (0, -values.shape[1] % count))
    words = torch.zeros(len(values), padded.shape[1] // count, dtype=torch.int64)
    for place, value in enumerate(places or range(count)):
        words |= padded[:, value::count] << (bits * place)
    return (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def dense(values: Tensor, bits: int, dim: int) -> Tensor:
    """Return words likewise, but with no bit left over: a row is written bit by bit."""
    if dim == 0:
        return dense(values.T, bits, 1).T.contiguous()
    each = values.numpy()[:, :, None] >> np.arange(bits) & 1
    rows = each.reshape(len(values), -1).astype(np.uint8)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32)))
    return torch.from_numpy(np.packbits(rows, axis=1, bitorder="little").view("<i4"))


def parts_of(layer: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors that files have of a layer's weight, and the numbers that they stand for."""
    integers, zeros, scales, groups, numbers = quantise(weight, form)
    if form.names == "awq":
        found = {
            "qweight": packed(integers.T, 4, 1, AWQ_OUTPUTS),
            "qzeros": packed(zeros.T, 4, 1, AWQ_OUTPUTS),
            "scales": scales.T.contiguous(),
        }
    elif form.names == "awq_rows":  # in so many words as kernels read at once, the last of them of nothing
        groups_read = {32: 32, 64: 16}.get(form.group, 8)
        zeros, scales = (F.pad(each, (0, -each.shape[1] % groups_read)) for each in (zeros, scales))
        found = {
            "qweight": dense(integers, 4, 1),
            "qzeros": dense(zeros, 4, 1),
            "scales": scales,
        }
    elif form.names.startswith("gptq"):
        stored = zeros if form.names == "gptq_v2" else zeros - 1
        found = {
            "qweight": dense(integers.T, form.bits, 0),
            "qzeros": dense(stored.T, form.bits, 1),
            "scales": scales.T.contiguous(),
        }
        if form.config["quant_method"] == "gptq":
            found["g_idx"] = groups.int()
    else:
        found = {"weight_scale": scales}
        middle = 1 << (form.bits - 1)
        if form.names == "int-quantized":
            found["weight"] = (integers - middle).to(torch.int8)
            if not form.symmetric:
                found["weight_zero_point"] = (zeros - middle).to(torch.int8)
        else:
            pack = packed if form.left_over else dense
            found |= {
                "weight_packed": pack(integers, form.bits, 1),
                "weight_shape": torch.tensor(weight.shape),
            }
            if not form.symmetric:
                found["weight_zero_point"] = pack(zeros, form.bits, 0)
            if form.ordered:
                found["weight_g_idx"] = groups.int()
    return {f"{layer}.{name}": tensor for name, tensor in found.items()}, numbers


def save_packed(
    kind: str, form: Form, folder: Path, sizes: dict[str, Any] | None = None
) -> tuple[Path, Path]:
    """Save a random model twice: with packed weights, and with the numbers that those stand for."""

    def parts(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return parts_of(name.removesuffix(".weight"), weight, form)

    return save_twice(kind, form.config, parts, folder, sizes)
