"""Folders whose weights are HQQ's integers are loaded as the numbers that those stand for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.models import expanded_file
from quire.engine.models.hqq_files import expand_hqq
from quire.engine.models.quantisation import HQQ
from quire.engine.models.reading import read_model
from quire.engine.models.weight_files import open_weights
from tests.models.divided_model import compare_divided
from tests.models.quantised_folder import save_twice
from tests.models.test_float8 import EVERY, assert_same, assert_same_divided, load

PARAMETERS = {"nbits": 4, "group_size": 64, "axis": 1, "channel_wise": True, "view_as_float": False}
CONFIG = {
    "quant_method": "hqq",
    "quant_config": {"weight_quant_params": PARAMETERS, "scale_quant_params": None, "offload_meta": False},
    "skip_modules": ["lm_head"],
}
QUERIES = "model.layers.0.self_attn.q_proj"  # [192, 160]


@dataclass(frozen=True, slots=True)
class Form:
    """group: numbers that have a scale, beside each other (axis 1), or as far apart as may be (axis 0)."""

    packing: str
    bits: int
    count: int  # of an element
    group: int | None = 32
    axis: int = 1
    dtype: torch.dtype = torch.uint8


FORMS = {
    "4 bits": Form("4bit_u8", 4, 2),
    "4 bits, groups far apart": Form("4bit_u8", 4, 2, axis=0),
    "4 bits, a group a row": Form("4bit_u8", 4, 2, group=None),
    "8 bits": Form("8bit_u8", 8, 1),
    "3 bits": Form("3bit_32", 3, 10, group=64, dtype=torch.int32),
    "3 bits, groups far apart": Form("3bit_32", 3, 10, axis=0, dtype=torch.int32),
    "2 bits": Form("2bit_u8", 2, 4, group=16),
    "1 bit": Form("1bit_u8", 1, 8, group=16),
}


def text(words: str) -> Tensor:
    return torch.tensor([ord(letter) for letter in words], dtype=torch.uint8)


def parts_of(layer: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors that files have of random integers, and the numbers that they stand for."""
    columns = form.group or weight.shape[1]
    rows = weight.numel() // columns
    if form.axis == 0:
        rows, columns = columns, rows
    integers = torch.randint(0, 2**form.bits, (rows, columns))
    shape = (rows, 1) if form.axis == 1 else (1, columns)
    scales, zeros = (torch.rand(shape) * 0.02).half(), (torch.rand(shape) * 2**form.bits).half()
    each = -(-rows // form.count)
    padded = torch.cat((integers, torch.zeros(each * form.count - rows, columns, dtype=torch.int64)))
    packed = sum(
        padded[at * each : (at + 1) * each] << form.bits * (form.count - 1 - at) for at in range(form.count)
    )
    assert isinstance(packed, Tensor)
    found = {
        "W_q": packed.to(form.dtype),
        "scale": scales,
        "zero": zeros,
        "shape": torch.tensor(weight.shape),
        "packing": text(form.packing),
        "unpack_view_dtype": text(str(form.dtype)),
        "compute_dtype": text("torch.float16"),
        "nbits": torch.tensor(form.bits, dtype=torch.int32),
        "axis": torch.tensor(form.axis, dtype=torch.int32),
        **({} if form.group is None else {"group_size": torch.tensor(form.group, dtype=torch.int32)}),
    }
    for name in (
        "view_as_float", "quant_scale", "quant_zero", "offload_meta", "round_zero", "channel_wise",
        "optimize", "encoded_state_dict", "stores_quant_config",
    ):  # fmt: skip
        found[name] = torch.tensor(int(name in ("channel_wise", "optimize")), dtype=torch.uint8)
    numbers = (integers.float() - zeros.float()) * scales.float()
    return {f"{layer}.{name}": tensor for name, tensor in found.items()}, numbers.view(weight.shape)


def save_hqq(kind: str, form: Form, folder: Path) -> tuple[Path, Path]:
    """Save a random model twice: with HQQ's weights, and with the numbers that those stand for."""
    return save_twice(
        kind, CONFIG, lambda name, weight: parts_of(name.removesuffix(".weight"), weight, form), folder
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_every_form_is_loaded_as_its_numbers(
    kind: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, plain = save_hqq(kind, FORMS[form], tmp_path)
    assert read_model(quantised).quantised == HQQ
    with caplog.at_level(logging.INFO, "quire.engine"):
        assert_same(load(quantised)[0], load(plain)[0])
    assert "HQQ's integers are loaded as the float32 numbers that they stand for" in caplog.text


@pytest.mark.parametrize("form", ["4 bits", "3 bits, groups far apart"])
@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe"])
def test_ranks_expand_their_shares(kind: str, form: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    quantised, plain = save_hqq(kind, FORMS[form], tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    verdict = compare_divided(quantised, reference, 2)
    assert verdict.outcome == "equal", verdict.detail


@pytest.mark.parametrize("form", ["4 bits", "3 bits, groups far apart", "4 bits, a group a row"])
def test_ranks_of_a_native_decoder_expand_their_shares(form: str, tmp_path: Path) -> None:
    assert_same_divided(*save_hqq("qwen3", FORMS[form], tmp_path), 2)


PARTS = [(), (slice(3, 50),), (EVERY, slice(71, 78)), (slice(7, 7), EVERY), (slice(9, 41), slice(13, 13))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", PARTS)
def test_any_part_of_a_weight_is_read_as_its_numbers(
    part: tuple[slice, ...], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A little at a time, on a GPU if there is one: native decoders expand there."""
    monkeypatch.setattr(expanded_file, "_PIECE", 1000)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors, numbers = parts_of("layer", torch.empty(72, 160), FORMS[form])
    save_file(tensors, tmp_path / "layer.safetensors")
    (file,) = expand_hqq([open_weights(tmp_path / "layer.safetensors")], torch.bfloat16, device)
    assert file.offset_keys() == ["layer.weight"]
    read = file.get_slice("layer.weight")[part or ...]
    assert read.device.type == device.type
    assert torch.equal(read.cpu(), numbers[part].bfloat16())


Edit = Callable[[dict[str, Tensor]], object]


def of(name: str, change: Callable[[Tensor], Any]) -> Edit:
    return lambda tensors: tensors.update({f"{QUERIES}.{name}": change(tensors[f"{QUERIES}.{name}"])})


WRONG: list[tuple[Edit, str]] = [
    (lambda t: t.pop(f"{QUERIES}.zero"), "zero beside it are missing"),
    (of("packing", lambda _: text("5bit_u8")), "its packing is '5bit_u8'; it may be 8bit_u8, 4bit_u8,"),
    (of("packing", lambda _: text("8bit_u8")), "has shape [480, 32], which is not of [192, 160] in 8bit_u8"),
    (of("packing", lambda _: text("3bit_32")), "it holds U8 of shape [480, 32], and shape is [192, 160]"),
    (of("shape", lambda shape: shape + 1), "which is not of [193, 161]"),
    (of("view_as_float", torch.ones_like), "view_as_float is set; only integers are read"),
    (of("scale", lambda scales: scales[1:].clone()), "scale holds F16 of shape [959, 1]"),
    (of("zero", Tensor.int), "zero holds I32 of shape [960, 1]"),
    (of("scale", lambda scales: scales * torch.inf), "stands for numbers that are not finite"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG, ids=[message for _, message in WRONG])
def test_parts_that_do_not_fit_are_refused_by_name(edit: Edit, message: str, tmp_path: Path) -> None:
    quantised, _ = save_hqq("qwen3", FORMS["4 bits"], tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    edit(tensors)
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=QUERIES) as refused:
        load(quantised)
    assert message in str(refused.value)
