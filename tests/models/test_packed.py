"""Folders whose weights are packed integers are loaded as the numbers that those stand for."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.models import expanded_file
from quire.engine.models.packed import Packed
from quire.engine.models.packed_files import expand_packed
from quire.engine.models.quantisation import read_quantised
from quire.engine.models.reading import read_model
from quire.engine.models.weight_files import open_weights
from quire.engine.parallel.fit import weight_bytes
from tests.models.any_model import save_tiny
from tests.models.divided_model import compare_divided
from tests.models.packed_folder import FORMS, auto_round, awq, compressed, gptq, parts_of, save_packed
from tests.models.quantised_folder import configure, save_twice
from tests.models.test_float8 import EVERY, assert_same, assert_same_divided, load

QUERIES = "model.layers.0.self_attn.q_proj"  # [192, 160]
CPU = torch.device("cpu")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_loaded_as_its_numbers(form: str, tmp_path: Path) -> None:
    quantised, plain = save_packed("qwen3", FORMS[form], tmp_path)
    assert isinstance(read_model(quantised).quantised, Packed)
    assert_same(load(quantised)[0], load(plain)[0])


@pytest.mark.parametrize(
    ("kind", "form"),
    [("llama", "gptq"), ("opt", "awq"), ("gemma2", "gptq in act order"), ("qwen3_moe", "packed groups")],
)
def test_every_kind_of_model_is_loaded_as_its_numbers(kind: str, form: str, tmp_path: Path) -> None:
    quantised, plain = save_packed(kind, FORMS[form], tmp_path)
    assert_same(load(quantised)[0], load(plain)[0])


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("gemma2", "awq"),
        ("qwen3_moe", "gptq in act order"),
        ("qwen3_moe", "bytes"),
        ("gemma2", "gptq, 3 bits"),
        ("gemma2", "auto-round"),
        ("qwen3_moe", "packed groups of 3 bits with zero points"),
        ("gemma2", "awq in rows"),
    ],
)
def test_ranks_expand_their_shares(kind: str, form: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    quantised, plain = save_packed(kind, FORMS[form], tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    verdict = compare_divided(quantised, reference, 2)
    assert verdict.outcome == "equal", verdict.detail


@pytest.mark.parametrize(
    "form", ["gptq, 3 bits in act order", "auto-round as awq", "packed rows of 6 bits", "awq in rows"]
)
def test_ranks_of_a_native_decoder_expand_their_shares(form: str, tmp_path: Path) -> None:
    assert_same_divided(*save_packed("qwen3", FORMS[form], tmp_path), 2)


PARTS = [(), (slice(3, 50),), (EVERY, slice(70, 77)), (slice(7, 7), EVERY), (slice(9, 41), slice(13, 150))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", PARTS)
def test_any_part_of_a_weight_is_read_as_its_numbers(
    part: tuple[slice, ...], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A little at a time, on a GPU if there is one: native decoders expand there."""
    monkeypatch.setattr(expanded_file, "_PIECE", 1000)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors, numbers = parts_of("layer", torch.randn(72, 160), FORMS[form])
    save_file(tensors, tmp_path / "layer.safetensors")
    packed = read_quantised({"quantization_config": FORMS[form].config}, "")
    assert isinstance(packed, Packed)
    (file,) = expand_packed([open_weights(tmp_path / "layer.safetensors")], packed, torch.bfloat16, device)
    assert file.offset_keys() == ["layer.weight"]
    read = file.get_slice("layer.weight")[part or ...]
    assert read.device.type == device.type
    assert torch.equal(read.cpu(), numbers[part].bfloat16())


def test_rows_of_words_that_are_not_full(tmp_path: Path) -> None:
    """Of 45 inputs the last word has five, and of 13 outputs' zero points, too."""
    form = FORMS["packed groups with zero points"]
    tensors, numbers = parts_of("layer", torch.randn(13, 45), form)
    save_file(tensors, tmp_path / "layer.safetensors")
    packed = read_quantised({"quantization_config": form.config}, "")
    assert isinstance(packed, Packed)
    (file,) = expand_packed([open_weights(tmp_path / "layer.safetensors")], packed, torch.float32, CPU)
    assert file.get_slice("layer.weight").get_shape() == [13, 45]
    assert torch.equal(file.get_tensor("layer.weight"), numbers)


@pytest.mark.parametrize("left_over", [False, True])
def test_rows_of_integers_that_do_not_fill_words(left_over: bool, tmp_path: Path) -> None:
    """Of 3 bits words have ten each and bits left over, or none: the number of words tells."""
    form = replace(FORMS["packed groups of 3 bits with zero points"], left_over=left_over)
    tensors, numbers = parts_of("layer", torch.randn(35, 64), form)
    save_file(tensors, tmp_path / "layer.safetensors")
    packed = read_quantised({"quantization_config": form.config}, "")
    assert isinstance(packed, Packed)
    (file,) = expand_packed([open_weights(tmp_path / "layer.safetensors")], packed, torch.float32, CPU)
    assert torch.equal(file.get_tensor("layer.weight"), numbers)
    tensors, _ = parts_of("layer", torch.randn(35, 45), form)  # five words either way
    save_file(tensors, tmp_path / "layer.safetensors")
    with pytest.raises(ValueError, match=r"words of shape \[35, 5\] may be more than one kind of"):
        expand_packed([open_weights(tmp_path / "layer.safetensors")], packed, torch.float32, CPU)


def test_a_start_says_in_how_many_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantised, plain = save_packed("llama", FORMS["awq"], tmp_path)
    with caplog.at_level(logging.INFO, "quire.engine"):
        load(quantised, torch.bfloat16)
    said = "integers of 4 bits are loaded as the bfloat16 numbers that they stand for, in 4 times"
    assert said in caplog.text
    counted = [weight_bytes(folder, read_model(folder), 2) for folder in (quantised, plain)]
    assert counted[0] == counted[1]


OWN = {"lm_head": {"bits": 16, "data_type": "fp"}, ".*v_proj.*": {"bits": 8}, "o_proj": {"group_size": 80}}
MIXED = [
    ("auto-round as gptq", {"extra_config": OWN}),
    ("gptq v2", {"dynamic": {"-:lm_head": {}, "+:.*v_proj.*": {"bits": 8}, "o_proj": {"group_size": 80}}}),
]


@pytest.mark.parametrize(("form", "fields"), MIXED)
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_layers_may_have_bits_and_groups_of_their_own(
    kind: str, form: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Of 160 inputs five groups have 32 each, and two 80."""
    whole = replace(FORMS[form], config=FORMS[form].config | fields)

    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        layer = name.removesuffix(".weight")
        bits = 8 if "v_proj" in name else whole.bits
        return parts_of(layer, weight, replace(whole, bits=bits, group=80 if "o_proj" in name else 32))

    quantised, plain = save_twice(kind, whole.config, quantise, tmp_path)
    assert_same(load(quantised)[0], load(plain)[0])


def test_groups_that_two_sizes_would_have_end_elsewhere_are_not_guessed() -> None:
    packed = Packed("gptq", (4,), (96, 128))
    assert packed.group_of(160, 2) is None
    assert packed.group_of(384, 4) == 96
    assert packed.group_of(80, 1) == 80


GROUPS = compressed("pack-quantized", strategy="group", group_size=32)
REFUSED: dict[str, dict[str, Any]] = {
    "bits 5, which may be 2 or 3 or 4 or 8": gptq(bits=5),
    "bits None": {"quant_method": "gptq"},
    "the checkpoint_format 'exllama'": gptq(checkpoint_format="exllama"),
    "the checkpoint_format 'bitblas'": gptq(format="bitblas"),
    "the checkpoint_format 'marlin'": gptq(is_marlin_format=True),
    "the pack_dtype 'int16'": gptq(pack_dtype="int16"),
    "the packing_format 'auto_round:llm_compressor'": auto_round("auto_round:llm_compressor"),
    "the packing_format 'auto_round:exllamav2'": auto_round("", backend="auto_round:exllamav2"),
    "the data_type 'nv_fp'": auto_round("auto_round", data_type="nv_fp"),
    "act_bits 8": auto_round("auto_round", act_bits=8),
    "a rotation_config": auto_round("auto_round", rotation_config={"hadamard_type": "random"}),
    "bits 3, which may be 4": auto_round("auto_round:awq", bits=3),
    "bits 9, which may be 2": auto_round("auto_round", extra_config={"lm_head": {"bits": 9}}),
    "v_proj: the format 'gptq_v2', of a layer alone": gptq(dynamic={"v_proj": {"format": "gptq_v2"}}),
    "bits 7, which may be 2": gptq(dynamic={"lm_head": {"bits": 7}}),
    "group_size 0": gptq(group_size=0),
    "group_size '128'": gptq(group_size="128"),
    "bits 8, which may be 4": awq(bits=8),
    "the version 'gemv_fast'": awq(version="gemv_fast"),
    "the version 'llm-awq'": awq(version=None, checkpoint_format="llm-awq"),
    "the format 'marlin-24'": GROUPS | {"format": "marlin-24"},
    "group_0: num_bits 9": compressed("pack-quantized", strategy="group", group_size=32, num_bits=9),
    "group_0: the strategy 'block'": compressed("pack-quantized", strategy="block"),
    "group_size None": compressed("pack-quantized", strategy="group"),
    "the format 'float-quantized'": GROUPS | {"format": "float-quantized"},
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_other_packed_weights_are_refused_by_name(kind: str, what: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    configure(tmp_path, REFUSED[what])
    with pytest.raises(ValueError, match="quantization_config has .*" + re.escape(what)):
        read_model(tmp_path)


Edit = Callable[[dict[str, Tensor]], object]


def of(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda tensors: tensors.update({f"{QUERIES}.{name}": change(tensors[f"{QUERIES}.{name}"])})


WRONG: list[tuple[str, Edit, str]] = [
    ("gptq", lambda t: t.pop(f"{QUERIES}.scales"), "qweight: scales beside it are missing"),
    ("awq", lambda t: t.pop(f"{QUERIES}.qzeros"), "qweight: qzeros beside it are missing"),
    ("packed groups", lambda t: t.pop(f"{QUERIES}.weight_shape"), "weight_shape beside it are missing"),
    ("packed groups with zero points", lambda t: t.pop(f"{QUERIES}.weight_zero_point"), "are missing"),
    ("gptq", of("qweight", Tensor.float), "qweight: it holds F32 of shape [20, 192], not a matrix of I32"),
    ("gptq", of("qzeros", Tensor.float), "qzeros hold F32, not I32"),
    ("gptq", of("scales", Tensor.int), "scales hold I32; they may be F32, F16, BF16"),
    ("gptq", of("scales", lambda scales: scales[:, :-1].contiguous()), "scales have shape [5, 191]"),
    ("gptq", of("scales", lambda scales: scales[:-1].contiguous()), "scales have 4 groups of 160 inputs"),
    ("awq", of("qzeros", lambda zeros: zeros[:-1].contiguous()), "qzeros have shape [4, 24]"),
    ("awq in rows", of("scales", lambda scales: scales[:, 1:].contiguous()), "scales have shape [192, 31]"),
    ("awq in rows", of("qzeros", lambda zeros: zeros[:, 1:].contiguous()), "qzeros have shape [192, 3]"),
    ("gptq in act order", of("g_idx", lambda groups: groups[1:].clone()), "g_idx has shape [159]"),
    (
        "gptq in act order",
        of("g_idx", lambda groups: groups + 1),
        "inputs are in groups 1 to 5, and scales are of 5",
    ),
    ("gptq in act order", of("g_idx", lambda groups: groups - 1), "inputs are in groups -1 to 3, and"),
    ("packed groups", of("weight_shape", lambda shape: shape + 8), "words of shape [192, 20] are not of"),
    ("gptq", of("scales", lambda scales: scales * torch.inf), "stands for numbers that are not finite"),
    ("bytes", of("weight_scale", lambda scales: scales[:-1].clone()), "weight_scale have shape [191, 1]"),
]


@pytest.mark.parametrize(("form", "edit", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_parts_that_do_not_fit_are_refused_by_name(
    form: str, edit: Edit, message: str, tmp_path: Path
) -> None:
    quantised, _ = save_packed("qwen3", FORMS[form], tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    edit(tensors)
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=QUERIES) as refused:
        load(quantised)
    assert message in str(refused.value)


def test_a_bias_of_zeros_that_the_model_does_not_have_changes_nothing(tmp_path: Path) -> None:
    """As older GPTQ files have it."""
    quantised, plain = save_packed("llama", FORMS["gptq"], tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    tensors[f"{QUERIES}.bias"] = torch.zeros(192, dtype=torch.float16)
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    assert_same(load(quantised)[0], load(plain)[0])
    tensors[f"{QUERIES}.bias"][3] = 1
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"{QUERIES}.bias is no weight of LlamaForCausalLM"):
        load(quantised)


def test_groups_that_were_never_written_stand_beside_each_other(tmp_path: Path) -> None:
    """As compressed-tensors leaves them where there is no order."""
    quantised, plain = save_packed("qwen3", FORMS["packed groups"], tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    tensors[f"{QUERIES}.weight_g_idx"] = torch.full((160,), -1, dtype=torch.int32)
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    assert_same(load(quantised)[0], load(plain)[0])
