"""Which weights of layers stay in few bits, what a start says of them, and what counts their bytes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quire.doctor import _size, describe, on_gpus
from quire.engine.config import EngineConfig
from quire.engine.device.limits import Limits
from quire.engine.device.memory_profile import RESERVE_BYTES, refuse_too_large
from quire.engine.models.decoder import Decoder
from quire.engine.models.kept_weights import described
from quire.engine.models.loader import build_model
from quire.engine.models.reading import read_model
from quire.engine.models.stored_weights import keep_in_folder
from quire.engine.parallel.fit import fits, weight_bytes
from quire.engine.parallel.group import OneOfRanks
from quire.engine.precompile import precompile
from quire.engine.startup import start_engine
from quire.kernels.backend import torch_backend, triton_backend
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.quantised.linear import QuantisedLinear
from quire.kernels.quantised.weight import QuantisedWeight, WeightFormat
from tests.models import float8_folder, packed_folder
from tests.models.adapter_folder import lora_of, save_adapter
from tests.models.any_model import MAX_LEN, save_tiny
from tests.models.float8_folder import save_quantised
from tests.models.kept_folder import (
    FLOATS,
    KEEPING,
    LAYERS,
    PACKED,
    SIZES,
    W4A16,
    edit,
    expanded,
    load,
    save,
    tensors_of,
    weights_of,
)
from tests.models.packed_folder import Form, gptq, save_packed

ORDERED = Form(gptq(group_size=64, desc_act=True), "gptq", group=64, ordered=True)
EXPANDED: dict[str, tuple[Form, str]] = {
    "act order": (ORDERED, "act order"),
    "act order of words": (
        replace(PACKED["words"], config=W4A16, ordered=True),
        "act order",
    ),
    "small groups": (packed_folder.FORMS["awq"], "groups of 32"),
    "groups that end within half a line": (
        Form(gptq(group_size=192), "gptq", group=192),
        "groups of 192",
    ),
    "8 bits": (
        Form(gptq(bits=8, group_size=128), "gptq", bits=8, group=128, symmetric=True),
        "8 bits",
    ),
    "3 bits": (Form(gptq(bits=3, group_size=128), "gptq", bits=3, group=128), "3 bits"),
}


@pytest.mark.parametrize("what", EXPANDED)
def test_others_are_expanded_and_a_start_says_why(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    form, why = EXPANDED[what]
    folder, plain = save_packed("llama", form, tmp_path, SIZES)
    with caplog.at_level(logging.INFO, "quire.engine"):
        ours, num_bytes = load(folder)
    assert f"no weights are kept in few bits: {why} (14)\n" in caplog.text
    other, expected = load(plain)
    assert num_bytes == expected
    assert all(map(torch.equal, tensors_of(ours), tensors_of(other)))


def test_powers_of_two_are_expanded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, plain = save_quantised("qwen3", float8_folder.FORMS["compressed powers"], tmp_path, SIZES)
    with caplog.at_level(logging.INFO, "quire.engine"):
        ours, other = load(folder)[0], load(plain)[0]
    assert "no weights are kept in few bits: scales that are powers of two (14)\n" in caplog.text
    assert all(map(torch.equal, tensors_of(ours), tensors_of(other)))


def test_a_product_beside_weights_that_are_not_quantised_is_expanded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others of the layer are kept."""
    name = "model.layers.1.self_attn.k_proj.weight"
    folder, plain = save_quantised("qwen3", FLOATS["rows"], tmp_path, SIZES)
    numbers = load_file(plain / "model.safetensors")[name]
    edit(folder, lambda tensors: (tensors.pop(f"{name}_scale"), tensors.update({name: numbers})))
    with caplog.at_level(logging.INFO, "quire.engine"):
        ours, other = weights_of(load(folder)[0]), weights_of(load(plain)[0])
    assert "11 weights of layers are kept in 8 bits" in caplog.text
    why = "others are loaded as float32 numbers: next to weights that are not quantised (2);"
    assert why in caplog.text
    assert [isinstance(weight, Tensor) for weight in ours] == [at == 4 for at in range(8)]
    assert all(
        torch.equal(expanded(weight), expanded(each)) for weight, each in zip(ours, other, strict=True)
    )


def test_a_product_whose_inputs_on_a_rank_are_no_whole_lines_is_expanded(tmp_path: Path) -> None:
    """On 4 ranks 64 inputs of a product out of attention are on each."""
    folder = save("rows", tmp_path)
    model, _ = load(folder, config=read_model(folder).of_rank(4), ranks=OneOfRanks(1, 4))
    kept = [isinstance(weight, QuantisedWeight) for weight in weights_of(model)]
    assert kept == [True, False, True, True] * LAYERS


def test_an_adapter_is_merged_into_numbers(tmp_path: Path) -> None:
    folder = save("gptq", tmp_path)
    adapter = save_adapter(tmp_path / "adapter", lora_of("model.layers.0.mlp.down_proj", 256, 512), folder)
    config = read_model(folder, adapter=adapter)
    (ours, num_bytes), (other, expected) = (
        load(folder, backend, config=config) for backend in (KEEPING, torch_backend())
    )
    assert num_bytes == expected
    assert all(map(torch.equal, tensors_of(ours), tensors_of(other)))


def test_what_is_kept_is_told_by_config_json_where_files_are_not_here(tmp_path: Path) -> None:
    folder = save("blocks", tmp_path)
    model = read_model(folder)

    def kept() -> dict[str, WeightFormat]:
        return dict(keep_in_folder(folder, model, torch.bfloat16, KEEPING)(model).formats)

    here = kept()
    (folder / "model.safetensors").unlink()
    assert {name: replace(form, scales=torch.float32) for name, form in kept().items()} == here


def test_what_cannot_be_kept_is_told_by_config_json_too(tmp_path: Path) -> None:
    ordered, _ = save_packed("llama", ORDERED, tmp_path / "ordered", SIZES)
    folder = save("gptq", tmp_path / "other")
    adapter = save_adapter(tmp_path / "adapter", lora_of("model.layers.0.mlp.down_proj", 256, 512), folder)
    for model, why in (
        (read_model(ordered), "act order"),
        (read_model(folder, adapter=adapter), "an adapter is merged into them"),
    ):
        assert set(described(model).values()) == {why}


@pytest.mark.parametrize("form", ["blocks", "rows", "gptq", "words"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_fits_counts_the_bits_that_are_kept(form: str, ranks: int, tmp_path: Path) -> None:
    """All but norms, which it leaves out."""
    folder = save(form, tmp_path)
    model = read_model(folder)
    part = model.of_rank(ranks)
    keep = keep_in_folder(folder, model, torch.bfloat16, KEEPING)
    _, num_bytes = load(
        folder, dtype=torch.bfloat16, config=part, ranks=None if ranks == 1 else OneOfRanks(0, ranks)
    )
    norms = 2 * (256 * (2 * LAYERS + 1) + 2 * 64 * LAYERS)
    padding = weight_bytes(folder, part, 2) - weight_bytes(folder, part, 2, keep)
    assert padding > 0
    assert weight_bytes(folder, part, 2, keep) == pytest.approx(num_bytes - norms, rel=0.02)
    found = fits(folder, model, 2, UNSCALED[torch.bfloat16], 1 << 30, keep)
    assert [fit.weight_bytes for fit in found if fit.ranks == ranks] == [weight_bytes(folder, part, 2, keep)]


def test_a_start_and_the_doctor_count_the_bits_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("awq", tmp_path)
    _, num_bytes = load(folder, dtype=torch.bfloat16)
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="bfloat16", max_model_len=64, num_gpu_blocks_override=20,
        preemption_mode="recompute",
    )  # fmt: skip
    monkeypatch.setattr("quire.engine.rank.torch_backend", lambda: KEEPING)
    info = start_engine(config)[1]
    assert info.weight_bytes == num_bytes
    assert info.body_weight_bytes + 2 * info.head_weight_bytes == num_bytes
    assert info.kept_bits == (4,)
    assert dict(describe(info))["weights"].endswith("in bfloat16, and those of layers' products in 4 bits")
    model = read_model(folder)
    keep = keep_in_folder(folder, model, torch.bfloat16, triton_backend())
    told = dict(on_gpus(folder, model, info, config, 8 << 30))
    for ranks in (1, 2):
        size = weight_bytes(folder, model.of_rank(ranks), 2, keep)
        assert told[f"on {ranks} GPU{'s' * (ranks > 1)}"].startswith(f"weights {_size(size)} each")


@pytest.mark.parametrize("form", ["awq", "blocks"])
def test_the_doctor_counts_numbers_of_weights_that_are_to_be_expanded(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(form, tmp_path)
    model = read_model(folder)
    monkeypatch.setattr("quire.engine.rank.torch_backend", lambda: KEEPING)

    def told(**asked: Any) -> dict[str, str]:
        config = EngineConfig(
            model=str(folder), device="cpu", dtype="bfloat16", max_model_len=64, num_gpu_blocks_override=20,
            preemption_mode="recompute", **asked,
        )  # fmt: skip
        info = start_engine(config)[1]
        return dict(describe(info)) | dict(on_gpus(folder, model, info, config, 8 << 30))

    kept, all_numbers = told(), told(quantized_weights="expand")
    for each in (kept, all_numbers):
        assert ("those of layers' products in" in each["weights"]) == (each is kept)
    num_bytes = load(folder, torch_backend(), dtype=torch.bfloat16)[1]
    assert all_numbers["weights"] == f"{_size(num_bytes)} in bfloat16"
    for ranks in (1, 2):
        size = _size(weight_bytes(folder, model.of_rank(ranks), 2))
        told_of = f"on {ranks} GPU{'s' * (ranks > 1)}"
        assert all_numbers[told_of].startswith(f"weights {size} each")
        assert not kept[told_of].startswith(f"weights {size} each")


def test_a_start_that_has_no_room_for_expanded_weights_says_that_they_need_not_be(tmp_path: Path) -> None:
    folder, plain = save_quantised("qwen3", FLOATS["rows"], tmp_path, SIZES)

    def refuse(folder: Path, **asked: Any) -> None:
        config = EngineConfig(model=str(folder), gpu_memory_utilization=0.5, **asked)
        refuse_too_large(config, folder, read_model(folder), 2, UNSCALED[torch.bfloat16], 2 << 30)

    told = "take a smaller model, leave out --quantized-weights expand, or raise --gpu-memory-utilization"
    with pytest.raises(ValueError, match=told):
        refuse(folder, quantized_weights="expand")
    for asked in ({}, {"quantized_weights": "expand"}):
        with pytest.raises(ValueError, match="take a smaller model, or raise"):
            refuse(plain if asked else folder, **asked)


def test_a_start_that_would_have_room_for_rounded_weights_says_that_they_can_be(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path, **SIZES)
    model, config = read_model(tmp_path), EngineConfig(model=str(tmp_path), gpu_memory_utilization=1.0)
    num_bytes = weight_bytes(tmp_path, model, 2)
    told = "tensor-parallel-size 2, have its weights rounded to 8 bits by --quantization fp8, or raise"
    with pytest.raises(ValueError, match=told):
        refuse_too_large(config, tmp_path, model, 2, UNSCALED[torch.bfloat16], num_bytes + RESERVE_BYTES)
    # Embeddings are not rounded.
    with pytest.raises(ValueError, match=r"tensor-parallel-size \d, or raise"):
        refuse_too_large(config, tmp_path, model, 2, UNSCALED[torch.bfloat16], num_bytes // 2 + RESERVE_BYTES)


def test_a_start_is_not_refused_on_a_gpu_that_has_room_for_what_is_kept(tmp_path: Path) -> None:
    folder = save("awq", tmp_path)
    model = read_model(folder)
    keep = keep_in_folder(folder, model, torch.bfloat16, triton_backend())
    config = EngineConfig(model=str(folder), gpu_memory_utilization=1.0)
    room = weight_bytes(folder, model, 2, keep) + 1 + RESERVE_BYTES
    refuse_too_large(config, folder, model, 2, UNSCALED[torch.bfloat16], room, keep)
    with pytest.raises(ValueError, match="on one GPU the weights take"):
        refuse_too_large(config, folder, model, 2, UNSCALED[torch.bfloat16], room)


def test_layers_as_the_choice_of_kernels_sees_them_have_the_formats(tmp_path: Path) -> None:
    folder = save("awq", tmp_path)
    model, _ = load(folder)
    for shape, layer in zip(model.plans._kinds, model.layers, strict=False):
        assert isinstance(layer.qkv, QuantisedLinear)
        assert shape.qkv == layer.qkv.matrix
        assert shape.output.format == WeightFormat("int4", 128, True, torch.float16)


def test_kernels_are_compiled_for_each_kind_of_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four layers the second has one product expanded."""
    name = "model.layers.1.self_attn.o_proj.weight"
    folder, plain = save_quantised("qwen3", FLOATS["rows"], tmp_path, SIZES | {"num_hidden_layers": 4})
    numbers = load_file(plain / "model.safetensors")[name]
    edit(folder, lambda tensors: (tensors.pop(f"{name}_scale"), tensors.update({name: numbers})))
    built: list[Decoder] = []

    def build(*given: Any) -> Decoder:
        model = build_model(*given)
        assert isinstance(model, Decoder)
        built.append(model)
        return model

    monkeypatch.setattr("quire.engine.precompile.build_model", build)
    config, dtype = read_model(folder), torch.float32
    kept = keep_in_folder(folder, config, dtype, KEEPING)(config)
    precompile(
        config, KEEPING, Limits(4, 16, MAX_LEN), 16, UNSCALED[dtype], torch.device("cpu"), dtype, None,
        kept.formats,
    )  # fmt: skip
    found = [isinstance(weight, QuantisedWeight) for weight in weights_of(built[0], layers=3)]
    assert [found[:4], found[4:8], found[8:]] == [[True] * 4, [True, False, True, True], [True] * 4]


def test_a_start_says_what_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save("awq", tmp_path)
    with caplog.at_level(logging.INFO, "quire.engine"):
        load(folder, dtype=torch.bfloat16)
    assert "14 weights of layers are kept in 4 bits, as files have them; activations are not" in caplog.text
    assert "4 times the bytes" not in caplog.text


@pytest.mark.parametrize(("form", "held"), [("awq", "4"), ("rows", "2")])
def test_a_start_that_is_to_expand_says_that_it_does(
    form: str, held: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(form, tmp_path)
    with caplog.at_level(logging.INFO, "quire.engine"):
        model, num_bytes = load(folder, dtype=torch.bfloat16, quantized_weights="expand")
    assert "no weights are kept in few bits: --quantized-weights is expand (14)\n" in caplog.text
    assert f"{held} times the bytes" in caplog.text
    assert "no kernels" not in caplog.text
    other, expected = load(folder, torch_backend(), dtype=torch.bfloat16)
    assert num_bytes == expected
    assert all(map(torch.equal, tensors_of(model), tensors_of(other)))


def test_dummy_weights_are_numbers_if_they_are_to_be_expanded(tmp_path: Path) -> None:
    folder = save("words", tmp_path)
    given: dict[str, Any] = {"load_format": "dummy", "seed": 3}
    model, num_bytes = load(folder, quantized_weights="expand", **given)
    other, expected = load(folder, torch_backend(), **given)
    assert num_bytes == expected
    assert all(map(torch.equal, tensors_of(model), tensors_of(other)))
