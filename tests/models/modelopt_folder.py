"""Folders with weights as NVIDIA's ModelOpt has them, made by plain torch, and folders of their numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.models.quantised_folder import configure, save_twice

FOURS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # by three bits; the fourth is the sign
LARGEST = 448.0  # of torch.float8_e4m3fn
Parts = tuple[dict[str, Tensor], Tensor]


def matrices(weight: Tensor) -> Parts:
    """Return 8-bit floats with a scale for all, and the numbers that they stand for."""
    scale = weight.abs().max() / LARGEST
    floats = (weight / scale).to(torch.float8_e4m3fn)
    found = {"weight": floats, "weight_scale": scale, "input_scale": torch.tensor(0.25)}
    return found, floats.float() * scale


def rows(weight: Tensor) -> Parts:
    scales = weight.abs().amax(1) / LARGEST
    floats = (weight / scales[:, None]).to(torch.float8_e4m3fn)
    return {"weight": floats, "weight_scale": scales}, floats.float() * scales[:, None]


def blocks(weight: Tensor) -> Parts:
    """Return 8-bit floats with a scale for each 128 x 128, in four dimensions."""
    outputs, inputs = weight.shape
    scales = torch.rand(-(-outputs // 128), -(-inputs // 128)) * 0.01
    floats = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    each = scales.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
    return {"weight": floats, "weight_scale": scales[:, None, :, None]}, floats.float() * each


def powers(weight: Tensor) -> Parts:
    """Return 8-bit floats with an exponent of 2 for 32 each."""
    exponents = torch.randint(110, 125, (len(weight), weight.shape[1] // 32), dtype=torch.uint8)
    floats = torch.randn(weight.shape).to(torch.float8_e4m3fn)
    factors = 2.0 ** (exponents.float() - 127)
    found = {"weight": floats, "weight_scale": exponents}
    return found, floats.float() * factors.repeat_interleave(32, 1)


def fours(weight: Tensor) -> Parts:
    """Return 4-bit floats with 8-bit scales for 16 each, all of them multiplied by one number."""
    outputs, inputs = weight.shape
    codes = torch.randint(0, 16, (outputs, inputs))
    scales = (torch.rand(outputs, inputs // 16) * 200).to(torch.float8_e4m3fn)
    one = torch.tensor(0.0004)
    found = {
        "weight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": one,
        "input_scale": torch.tensor(7.0),
    }
    values = FOURS[codes & 7] * (1 - 2 * (codes >> 3))
    return found, values * (scales.float() * one).repeat_interleave(16, 1)


def integers(weight: Tensor) -> Parts:
    """Return integers of 4 bits with a sign, of two outputs a byte, in groups of 32 inputs."""
    outputs, inputs = weight.shape
    values = torch.randint(-8, 8, (outputs, inputs))
    scales = torch.rand(outputs, inputs // 32) * 0.01
    packed = (values[::2] & 15) | (values[1::2] & 15) << 4
    found = {"weight": packed.to(torch.uint8), "weight_scale": scales}
    return found, values * scales.repeat_interleave(32, 1)


def signed_bytes(weight: Tensor) -> Parts:
    scales = weight.abs().amax(1) / 127
    values = (weight / scales[:, None]).round().to(torch.int8)
    return {"weight": values, "weight_scale": scales}, values.float() * scales[:, None]


def with_factors(parts_of: Callable[[Tensor], Parts]) -> Callable[[Tensor], Parts]:
    """Return what makes parts with a number beside for each input, which that is multiplied by before."""

    def smoothed(weight: Tensor) -> Parts:
        found, numbers = parts_of(weight)
        factors = (torch.rand(weight.shape[1]) + 0.5).bfloat16()
        return found | {"pre_quant_scale": factors}, numbers * factors.float()

    return smoothed


@dataclass(frozen=True, slots=True)
class Form:
    parts_of: Callable[[Tensor], Parts]
    config: dict[str, Any]  # what config.json says
    own: dict[str, Any]  # what hf_quant_config.json says


def form(algorithm: str, parts_of: Callable[[Tensor], Parts], group: int | None = None, **own: Any) -> Form:
    """Return a form as `convert_hf_quant_config_format` of ModelOpt has its configurations."""
    weights = {"dynamic": False, "num_bits": 8, "type": "float"} | ({"group_size": group} if group else {})
    config: dict[str, Any] = {"quant_algo": algorithm, "quant_method": "modelopt", "ignore": ["lm_head"]}
    if algorithm in ("FP8", "NVFP4", "W4A16_NVFP4"):  # of others it says no more
        config["config_groups"] = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    told = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    return Form(parts_of, config, told | ({"group_size": group} if group else {}) | own)


FORMS = {
    "matrices": form("FP8", matrices),
    "rows": form("FP8_PER_CHANNEL_PER_TOKEN", rows),
    "blocks": form("fp8_pb_wo", blocks),
    "powers": form("MXFP8", powers, 32),
    "fours": form("NVFP4", fours, 16),
    "fours of weights alone": form("W4A16_NVFP4", fours, 16),
    "fours with factors": form("NVFP4_AWQ", with_factors(fours), 16, pre_quant_scale=True),
    "integers": form("W4A16_AWQ", integers, 32, pre_quant_scale=True, has_zero_point=False),
    "integers with factors": form("W4A16_AWQ", with_factors(integers), 32, pre_quant_scale=True),
    "bytes": form("W8A16", signed_bytes),
    "bytes with factors": form("W8A8_SQ_PER_CHANNEL", with_factors(signed_bytes)),
}


def parts_by(form: Form, layer: str, weight: Tensor) -> Parts:
    found, numbers = form.parts_of(weight)
    return {f"{layer}.{name}": tensor for name, tensor in found.items()}, numbers


def save_modelopt(
    kind: str, form: Form, folder: Path, told: str = "both", sizes: dict[str, Any] | None = None
) -> tuple[Path, Path]:
    """Save a random model twice: with weights as ModelOpt has them, and with the numbers of those.

    told: which files say so, `config.json`, `hf_quant_config.json` or both.
    """

    def parts_of(name: str, weight: Tensor) -> Parts:
        return parts_by(form, name.removesuffix(".weight"), weight)

    quantised, plain = save_twice(kind, form.config, parts_of, folder, sizes)
    if told == "hf_quant_config.json":
        configure(quantised, {})
    if told != "config.json":
        tell(quantised, form.own)
    return quantised, plain


def tell(folder: Path, own: dict[str, Any]) -> None:
    """Write the file of ModelOpt's own."""
    producer = {"name": "modelopt", "version": "0.39.0"}
    text = json.dumps({"producer": producer, "quantization": own})
    (folder / "hf_quant_config.json").write_text(text)
