"""Folders whose weights are compressed-tensors' 4-bit floats are loaded as the numbers of those."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.models import expanded_file
from quire.engine.models.fours_files import OF_COMPRESSED, OF_MXFP4, Names, expand_fours
from quire.engine.models.reading import read_model
from quire.engine.models.weight_files import open_weights
from tests.models.any_model import save_tiny
from tests.models.divided_model import compare_divided
from tests.models.float8_folder import compressed
from tests.models.quantised_folder import configure, save_twice
from tests.models.test_float8 import EVERY, assert_same, assert_same_divided, load

FOURS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # by three bits; the fourth is the sign
OF_SIXTEEN = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
OF_POWERS = {"num_bits": 4, "strategy": "group", "group_size": 32}
CONFIGS = {
    "NVFP4": compressed(**OF_SIXTEEN) | {"format": "nvfp4-pack-quantized"},
    "MXFP4": compressed(**OF_POWERS) | {"format": "mxfp4-pack-quantized"},
}
QUERIES = "model.layers.0.self_attn.q_proj"  # [192, 160]


def parts_of(layer: str, weight: Tensor, form: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors that files have of random codes, and the numbers that they stand for."""
    outputs, inputs = weight.shape
    codes = torch.randint(0, 16, (outputs, inputs))
    found = {"weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)}
    if form == "NVFP4":
        scales = (torch.rand(outputs, inputs // 16) * 200).to(torch.float8_e4m3fn)
        divisor = torch.tensor([2500.0])
        found |= {"weight_scale": scales, "weight_global_scale": divisor}
        found["input_global_scale"] = torch.tensor([7.0])
        factors = (scales.float() / divisor).repeat_interleave(16, 1)
    else:
        found["weight_scale"] = torch.randint(115, 125, (outputs, inputs // 32), dtype=torch.uint8)
        factors = (2.0 ** (found["weight_scale"].float() - 127)).repeat_interleave(32, 1)
    values = FOURS[codes & 7] * (1 - 2 * (codes >> 3))
    return {f"{layer}.{name}": tensor for name, tensor in found.items()}, values * factors


def save_fours(kind: str, form: str, folder: Path, sizes: dict[str, Any] | None = None) -> tuple[Path, Path]:
    """Save a random model twice: with weights of 4-bit floats, and with the numbers of those."""
    return save_twice(
        kind,
        CONFIGS[form],
        lambda name, weight: parts_of(name.removesuffix(".weight"), weight, form),
        folder,
        sizes,
    )


@pytest.mark.parametrize(("form", "times"), [("NVFP4", 7.1), ("MXFP4", 7.5)])
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_weights_are_loaded_as_their_numbers(
    kind: str, form: str, times: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, plain = save_fours(kind, form, tmp_path)
    with caplog.at_level(logging.INFO, "quire.engine"):
        assert_same(load(quantised)[0], load(plain)[0])
    said = f"in {form} are loaded as the float32 numbers that they stand for, in {times} times"
    assert said in caplog.text


@pytest.mark.parametrize("form", CONFIGS)
def test_ranks_expand_their_shares(form: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    quantised, plain = save_fours("gemma2", form, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    verdict = compare_divided(quantised, reference, 2)
    assert verdict.outcome == "equal", verdict.detail


@pytest.mark.parametrize("form", CONFIGS)
def test_ranks_of_a_native_decoder_expand_their_shares(form: str, tmp_path: Path) -> None:
    assert_same_divided(*save_fours("qwen3", form, tmp_path), 2)


PARTS = [(), (slice(3, 50),), (EVERY, slice(71, 78)), (slice(7, 7), EVERY), (slice(9, 41), slice(13, 13))]


@pytest.mark.parametrize(("form", "names"), [("NVFP4", OF_COMPRESSED), ("MXFP4", OF_MXFP4)])
@pytest.mark.parametrize("part", PARTS)
def test_any_part_of_a_weight_is_read_as_its_numbers(
    part: tuple[slice, ...], form: str, names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expanded_file, "_PIECE", 1000)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors, numbers = parts_of("layer", torch.empty(73, 160), form)
    save_file(tensors, tmp_path / "layer.safetensors")
    (file,) = expand_fours([open_weights(tmp_path / "layer.safetensors")], names, torch.bfloat16, device)
    assert file.offset_keys() == ["layer.weight"]
    read = file.get_slice("layer.weight")[part or ...]
    assert read.device.type == device.type
    assert torch.equal(read.cpu(), numbers[part].bfloat16())


@pytest.mark.parametrize(
    "config",
    [
        compressed(**OF_POWERS) | {"format": "nvfp4-pack-quantized"},
        compressed(**OF_SIXTEEN) | {"format": "mxfp4-pack-quantized"},
        compressed(**(OF_SIXTEEN | {"num_bits": 8})) | {"format": "nvfp4-pack-quantized"},
        CONFIGS["NVFP4"] | {"format": "float-quantized"},
        CONFIGS["MXFP4"] | {"format": "mxfp8-quantized"},
    ],
)
def test_other_floats_are_refused_by_name(config: dict[str, Any], tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    configure(tmp_path, config)
    with pytest.raises(ValueError, match=r"quantization_config has group_0: weights of [48] bits"):
        read_model(tmp_path)


Edit = Callable[[dict[str, Tensor]], object]
WRONG: list[tuple[str, Edit, str]] = [
    ("NVFP4", lambda t: t.pop(f"{QUERIES}.weight_global_scale"), "weight_global_scale beside it not"),
    (
        "NVFP4",
        lambda t: t.update({f"{QUERIES}.weight_scale": t[f"{QUERIES}.weight_scale"].float()}),
        "its parts hold {'weight_packed': 'U8', 'weight_scale': 'F32'",
    ),
    (
        "NVFP4",
        lambda t: t.update({f"{QUERIES}.weight_scale": t[f"{QUERIES}.weight_scale"][:-1].clone()}),
        "has shape [192, 80], and weight_scale [191, 10]",
    ),
    ("NVFP4", lambda t: t[f"{QUERIES}.weight_global_scale"].zero_(), "numbers that are not finite"),
    ("MXFP4", lambda t: t.pop(f"{QUERIES}.weight_scale"), "it is there, and weight_scale beside it not"),
    ("MXFP4", lambda t: t[f"{QUERIES}.weight_scale"].fill_(255), "numbers that are not finite"),
    (
        "MXFP4",
        lambda t: t.update({f"{QUERIES}.weight_global_scale": torch.ones(1)}),
        "weight_global_scale is no weight of",
    ),
]


@pytest.mark.parametrize(("form", "edit", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_parts_that_do_not_fit_are_refused_by_name(
    form: str, edit: Edit, message: str, tmp_path: Path
) -> None:
    quantised, _ = save_fours("qwen3", form, tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    edit(tensors)
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=QUERIES) as refused:
        load(quantised)
    assert message in str(refused.value)
