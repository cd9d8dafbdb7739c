"""Folders with weights as NVIDIA's ModelOpt has them are loaded as the numbers that those stand for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.models import expanded_file
from quire.engine.models.expansion import expand_files
from quire.engine.models.float8 import Float8
from quire.engine.models.quantisation import read_quantised
from quire.engine.models.reading import read_model
from quire.engine.models.weight_files import open_weights
from tests.models.any_model import save_tiny
from tests.models.divided_model import compare_divided
from tests.models.modelopt_folder import FORMS, parts_by, save_modelopt, tell
from tests.models.quantised_folder import configure
from tests.models.test_float8 import EVERY, assert_same, assert_same_divided, load

QUERIES = "model.layers.0.self_attn.q_proj"  # [192, 160]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_every_form_is_loaded_as_its_numbers(kind: str, form: str, tmp_path: Path) -> None:
    quantised, plain = save_modelopt(kind, FORMS[form], tmp_path)
    assert_same(load(quantised)[0], load(plain)[0])


@pytest.mark.parametrize("told", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize(("kind", "form"), [("llama", "matrices"), ("qwen3_moe", "fours")])
def test_either_file_tells(kind: str, form: str, told: str, tmp_path: Path) -> None:
    quantised, plain = save_modelopt(kind, FORMS[form], tmp_path, told)
    assert_same(load(quantised)[0], load(plain)[0])


@pytest.mark.parametrize("form", ["matrices", "blocks", "fours with factors", "integers with factors"])
def test_ranks_expand_their_shares(form: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    quantised, plain = save_modelopt("gemma2", FORMS[form], tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    verdict = compare_divided(quantised, reference, 2)
    assert verdict.outcome == "equal", verdict.detail


@pytest.mark.parametrize(
    "form", ["matrices", "blocks", "powers", "fours with factors", "integers with factors"]
)
def test_ranks_of_a_native_decoder_expand_their_shares(form: str, tmp_path: Path) -> None:
    assert_same_divided(*save_modelopt("qwen3", FORMS[form], tmp_path), 2)


PARTS = [(), (slice(3, 50),), (EVERY, slice(71, 78)), (slice(7, 7), EVERY), (slice(9, 41), slice(13, 150))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", PARTS)
def test_any_part_of_a_weight_is_read_as_its_numbers(
    part: tuple[slice, ...], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A little at a time, on a GPU if there is one: native decoders expand there."""
    monkeypatch.setattr(expanded_file, "_PIECE", 1000)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors, numbers = parts_by(FORMS[form], "layer", torch.randn(72, 160))
    save_file(tensors, tmp_path / "layer.safetensors")
    given = FORMS[form].own | FORMS[form].config
    quantised = read_quantised({"quantization_config": given}, "")
    files = [open_weights(tmp_path / "layer.safetensors")]
    (file,) = expand_files(files, quantised, torch.bfloat16, device)
    assert file.offset_keys() == ["layer.weight"]
    read = file.get_slice("layer.weight")[part or ...]
    assert read.device.type == device.type
    assert torch.equal(read.cpu(), numbers[part].bfloat16())


def test_a_file_that_tells_of_nothing_changes_nothing(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    tell(tmp_path, {"quant_algo": None, "kv_cache_quant_algo": None})
    assert read_model(tmp_path).quantised is None


def test_another_method_does_not_ask_the_file(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    configure(tmp_path, {"quant_method": "fp8"})
    tell(tmp_path, FORMS["fours"].own)
    assert isinstance(read_model(tmp_path).quantised, Float8)


REFUSED: dict[str, dict[str, Any]] = {
    "ModelOpt's quant_algo 'MIXED_PRECISION'": {"quantized_layers": {"a": {"quant_algo": "FP8"}}},
    "ModelOpt's quant_algo 'NVFP4_SVD'": {"pre_quant_scale": True},
    "ModelOpt's quant_algo 'W4A8_AWQ'": {},
    "ModelOpt's quant_algo 'W4A8_MXFP4_FP8'": {"group_size": 32},
    "NVFP4 in groups of 32": {"quant_algo": "NVFP4", "group_size": 32},
    "a group_size of '16'": {"quant_algo": "NVFP4", "group_size": "16"},
    "a group_size of 0.5": {"quant_algo": "W4A16_AWQ", "group_size": 0.5},
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_others_are_refused_by_name(kind: str, what: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    own = {"quant_algo": what.split("'")[-2] if "quant_algo" in what else None} | REFUSED[what]
    tell(tmp_path, own)
    with pytest.raises(ValueError, match="quantization_config has .*" + re.escape(what)):
        read_model(tmp_path)


Edit = Callable[[dict[str, Tensor]], object]


def of(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda tensors: tensors.update({f"{QUERIES}.{name}": change(tensors[f"{QUERIES}.{name}"])})


WRONG: list[tuple[str, Edit, str]] = [
    ("matrices", lambda t: t.pop(f"{QUERIES}.weight_scale"), "is of 8-bit floats, and neither"),
    ("matrices", of("weight_scale", lambda scale: scale.expand(3).clone()), "weight_scale has shape [3]"),
    ("blocks", of("weight_scale", lambda scales: scales[:1].clone()), "weight_scale has shape [1, 1, 2, 1]"),
    ("fours", lambda t: t.pop(f"{QUERIES}.weight_scale_2"), "weight_scale_2 beside it not"),
    ("fours", of("weight_scale", lambda scales: scales[:-1].clone()), "and weight_scale [191, 10]"),
    ("fours", of("weight_scale_2", lambda one: one.expand(2).clone()), "shape [2]; it must be one number"),
    ("fours with factors", of("pre_quant_scale", lambda each: each[1:].clone()), "BF16 of shape [159]"),
    ("integers", lambda t: t.pop(f"{QUERIES}.weight_scale"), "weight_scale beside it are missing"),
    ("integers", of("weight", lambda held: held.view(torch.int8)), "not a matrix of U8"),
    ("integers", of("weight_scale", lambda each: each[:, 1:].clone()), "have 4 groups of 160 inputs"),
    ("integers with factors", of("pre_quant_scale", lambda each: each[1:].clone()), "has shape [159]"),
    ("bytes", of("weight_scale", lambda scales: scales[1:].clone()), "weight_scale have shape [191]"),
    (
        "matrices",
        lambda t: t.update({f"{QUERIES}.pre_quant_scale": torch.ones(160)}),
        "pre_quant_scale is no weight of",
    ),
]


@pytest.mark.parametrize(("form", "edit", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_parts_that_do_not_fit_are_refused_by_name(
    form: str, edit: Edit, message: str, tmp_path: Path
) -> None:
    quantised, _ = save_modelopt("qwen3", FORMS[form], tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    edit(tensors)
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=QUERIES) as refused:
        load(quantised)
    assert message in str(refused.value)
