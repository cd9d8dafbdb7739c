"""Weights of layers stay in the few bits that files have, and stand for the numbers that they would be."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.doctor import _size, describe, on_gpus
from quire.engine.config import EngineConfig
from quire.engine.device.limits import Limits
from quire.engine.device.memory_profile import RESERVE_BYTES, refuse_too_large
from quire.engine.models.decoder import Decoder
from quire.engine.models.expansion import expand_files
from quire.engine.models.loader import build_model, load_model
from quire.engine.models.reading import read_model
from quire.engine.models.stored_weights import keep_in_folder
from quire.engine.models.weight_files import open_weights
from quire.engine.parallel.fit import fits, weight_bytes
from quire.engine.parallel.group import OneOfRanks
from quire.engine.precompile import precompile
from quire.engine.startup import start_engine
from quire.kernels.backend import torch_backend
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.quantised.linear import QuantisedLinear
from quire.kernels.quantised.supports import keeps
from quire.kernels.quantised.weight import QuantisedWeight, WeightFormat, expand_reference
from tests.models import float8_folder, packed_folder
from tests.models.adapter_folder import lora_of, save_adapter
from tests.models.any_model import LENGTHS, MAX_LEN, STEPS, prompts
from tests.models.float8_folder import save_quantised
from tests.models.packed_folder import Form, awq, compressed, gptq, save_packed
from tests.models.paged_driver import PagedDriver
from tests.models.thread_ranks import Meeting, Rank, on_all

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
KEEPING = replace(torch_backend(), keeps=lambda form, dtype: True)  # as a GPU's
W4A16 = compressed("pack-quantized", strategy="group", group_size=64)
PACKED = {
    "awq": Form(awq(group_size=128), "awq", group=128),
    "awq in rows": Form(awq(version="gemv", group_size=64), "awq_rows", group=64),
    "gptq": Form(gptq(group_size=128), "gptq", group=128, symmetric=True),
    "gptq v2": Form(gptq(group_size=64, checkpoint_format="gptq_v2"), "gptq_v2", group=64),
    "gptq, a group": Form(gptq(group_size=-1), "gptq", group=0),
    "words": Form(W4A16, "pack-quantized", group=64, symmetric=True, scale_dtype=torch.bfloat16),
    "words with zero points": Form(
        compressed("pack-quantized", strategy="group", group_size=128, symmetric=False),
        "pack-quantized",
        group=128,
    ),
}
FLOATS = {
    "blocks": float8_folder.FORMS["blocks"],
    "blocks of 48 rows": float8_folder.Form(
        float8_folder.compressed(strategy="block", block_structure=[48, 64]), 48, 64
    ),
    "rows": float8_folder.FORMS["compressed rows"],
    "matrices": float8_folder.FORMS["matrices"],
}
FORMS = [*PACKED, *FLOATS]
LAYERS, PRODUCTS_OF_LAYER = 4, 7


def save(form: str, folder: Path, kind: str = "qwen3") -> Path:
    if form in PACKED:
        return save_packed(kind, PACKED[form], folder, SIZES)[0]
    return save_quantised(kind, FLOATS[form], folder, SIZES)[0]


def load(
    folder: Path, backend: Any = KEEPING, dtype: torch.dtype = torch.float32, **given: Any
) -> tuple[Decoder, int]:
    config = given.pop("config", None) or read_model(folder)
    model, num_bytes = load_model(
        folder, config, backend, device="cpu", dtype=dtype, max_model_len=MAX_LEN, **given
    )
    assert isinstance(model, Decoder)
    return model, num_bytes


def generate(model: Decoder) -> tuple[list[list[int]], list[Tensor]]:
    return PagedDriver(model, model.config, len(LENGTHS) + 1, MAX_LEN).generate(prompts(), STEPS)


def weights_of(model: Decoder, layers: int = LAYERS) -> list[QuantisedWeight | Tensor]:
    """Return the weights of all products, a layer after the other."""
    every = [
        product.weight
        for layer in model.layers
        for product in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)  # type: ignore[attr-defined]
    ]
    assert len(every) == 4 * layers
    return every


def expanded(weight: QuantisedWeight | Tensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else expand_reference(weight, torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_kept_weights_stand_for_the_numbers_that_they_would_be(form: str, tmp_path: Path) -> None:
    folder = save(form, tmp_path)
    ours, other = load(folder)[0], load(folder, torch_backend())[0]
    for weight, numbers in zip(weights_of(ours), weights_of(other), strict=True):
        assert isinstance(weight, QuantisedWeight) and isinstance(numbers, Tensor)
        assert torch.equal(expanded(weight), numbers)
    (tokens, logits), (expected, theirs) = generate(ours), generate(other)
    assert tokens == expected
    for each, wanted in zip(logits, theirs, strict=True):
        torch.testing.assert_close(each, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_any_part_of_a_weight_is_read_as_it_is_kept(form: str, tmp_path: Path) -> None:
    """Parts of outputs begin anywhere, and those of inputs where a group does."""
    folder, config = save(form, tmp_path), read_model(tmp_path / "quantised")
    files = expand_files(
        [open_weights(folder / "model.safetensors")], config.quantised, torch.float32, torch.device("cpu")
    )
    tensor = files[0].get_slice("model.layers.1.mlp.down_proj.weight")  # [256, 512]
    for outputs, inputs in (((0, 256), (0, 512)), ((37, 91), (128, 384)), ((255, 256), (384, 512))):
        weight = QuantisedWeight.empty(
            tensor.kept_format, outputs[1] - outputs[0], inputs[1] - inputs[0], torch.device("cpu")
        )
        weight.fill(tensor.numbers(outputs, inputs))
        assert torch.equal(expanded(weight), tensor[slice(*outputs), slice(*inputs)])


@pytest.mark.parametrize("form", FORMS)
def test_ranks_keep_their_shares(form: str, tmp_path: Path) -> None:
    folder, meeting = save(form, tmp_path), Meeting(2)
    part = read_model(folder).of_rank(2)

    def run(rank: int) -> tuple[list[list[int]], list[Tensor], list[QuantisedWeight | Tensor]]:
        model, _ = load(folder, config=part, ranks=Rank(rank, meeting))
        return *generate(model), weights_of(model)

    whole, _ = load(folder)
    expected, logits = generate(whole)
    ranks = on_all(meeting, run)
    for tokens, theirs, weights in ranks:
        assert tokens == expected
        assert all(isinstance(weight, QuantisedWeight) for weight in weights)
        for each, wanted in zip(theirs, logits, strict=True):
            torch.testing.assert_close(each, wanted, atol=1e-4, rtol=0)
    for at, weight in enumerate(weights_of(whole)):
        if at % 2:  # of the products out of attention and down ranks have some of the inputs
            parts = [expanded(weights[at]) for _, _, weights in ranks]
            assert torch.equal(torch.cat(parts, 1), expanded(weight))


ORDERED = Form(gptq(group_size=64, desc_act=True), "gptq", group=64, ordered=True)
EXPANDED: dict[str, tuple[Form, str]] = {
    "act order": (ORDERED, "act order"),
    "act order of words": (
        replace(PACKED["words"], config=W4A16, ordered=True),
        "act order",
    ),
    "small groups": (packed_folder.FORMS["awq"], "groups of 32"),
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
    assert f"no weights are kept in few bits: {why} (28)\n" in caplog.text
    other, expected = load(plain)
    assert num_bytes == expected
    assert all(map(torch.equal, weights_of(ours), weights_of(other)))  # type: ignore[arg-type]


def test_powers_of_two_are_expanded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, plain = save_quantised("qwen3", float8_folder.FORMS["compressed powers"], tmp_path, SIZES)
    with caplog.at_level(logging.INFO, "quire.engine"):
        ours, other = load(folder)[0], load(plain)[0]
    assert "no weights are kept in few bits: scales that are powers of two (28)\n" in caplog.text
    assert all(map(torch.equal, weights_of(ours), weights_of(other)))  # type: ignore[arg-type]


def test_a_group_that_is_told_in_order_is_kept(tmp_path: Path) -> None:
    """Of GPTQ files have each input's group, in act order or not."""
    folder = save("gptq", tmp_path)
    names = load_file(folder / "model.safetensors")
    assert sum(name.endswith("g_idx") for name in names) == LAYERS * PRODUCTS_OF_LAYER
    assert all(isinstance(weight, QuantisedWeight) for weight in weights_of(load(folder)[0]))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_product_beside_weights_that_are_not_quantised_is_expanded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others of the layer are kept."""
    name = "model.layers.2.self_attn.k_proj.weight"
    folder, plain = save_quantised("qwen3", FLOATS["rows"], tmp_path, SIZES)
    numbers = load_file(plain / "model.safetensors")[name]
    edit(folder, lambda tensors: (tensors.pop(f"{name}_scale"), tensors.update({name: numbers})))
    with caplog.at_level(logging.INFO, "quire.engine"):
        ours, other = weights_of(load(folder)[0]), weights_of(load(plain)[0])
    assert "25 weights of layers are kept in 8 bits" in caplog.text
    why = "others are loaded as float32 numbers: next to weights that are not quantised (2);"
    assert why in caplog.text
    assert [isinstance(weight, Tensor) for weight in ours] == [at == 8 for at in range(16)]
    assert all(
        torch.equal(expanded(weight), expanded(each)) for weight, each in zip(ours, other, strict=True)
    )


def test_scales_and_zero_points_of_a_product_are_widened(tmp_path: Path) -> None:
    """Where its parts have scales of other dtypes, and only some have zero points."""
    folder = save("words", tmp_path)
    name = "model.layers.0.mlp.up_proj"
    zeros = torch.full((512 // 8, 4), 0x55555555, dtype=torch.int32)

    def widen(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}.weight_scale"] = tensors[f"{name}.weight_scale"].half()
        tensors[f"{name}.weight_zero_point"] = zeros

    edit(folder, widen)
    ours, other = weights_of(load(folder)[0])[2], weights_of(load(folder, torch_backend())[0])[2]
    assert isinstance(ours, QuantisedWeight)
    assert ours.format == WeightFormat("int4", 64, True, torch.float32)
    assert torch.equal(expanded(ours), expanded(other))


def test_of_an_input_that_no_rank_has_whole_lines_of_all_is_expanded(tmp_path: Path) -> None:
    """On 4 ranks 64 inputs of a product out of attention are on each."""
    folder = save("rows", tmp_path)
    model, _ = load(folder, config=read_model(folder).of_rank(4), ranks=OneOfRanks(1, 4))
    kept = [isinstance(weight, QuantisedWeight) for weight in weights_of(model)]
    assert kept == [True, False, True, True] * LAYERS


@pytest.mark.parametrize(("form", "part"), [("rows", ".weight_scale"), ("gptq", ".scales")])
def test_scales_that_are_not_finite_are_refused_by_name(form: str, part: str, tmp_path: Path) -> None:
    folder, name = save(form, tmp_path), "model.layers.1.self_attn.o_proj"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name + part].view(-1)[5] = torch.inf

    edit(folder, spoil)
    with pytest.raises(ValueError, match=f"{name}.*stands for numbers that are not finite"):
        load(folder)


def test_codes_that_are_no_numbers_are_refused_by_name(tmp_path: Path) -> None:
    folder, name = save("blocks", tmp_path), "model.layers.3.mlp.gate_proj.weight"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(torch.uint8)[7, 9] = 0xFF

    edit(folder, spoil)
    with pytest.raises(ValueError, match=f"{name} stands for numbers that are not finite"):
        load(folder)


def test_numbers_that_are_too_large_for_fp16_are_refused_by_name(tmp_path: Path) -> None:
    """And not those whose scale is large, but no code."""
    folder, name = save("matrices", tmp_path), "model.layers.3.mlp.gate_proj.weight"

    def enlarge(tensors: dict[str, Tensor]) -> None:
        tensors[name].copy_(torch.full_like(tensors[name].float(), 2.0).to(torch.float8_e4m3fn))
        tensors[f"{name}_scale"].fill_(30_000.0)

    edit(folder, enlarge)
    load(folder, dtype=torch.float16)
    edit(folder, lambda tensors: tensors[f"{name}_scale"].fill_(40_000.0))
    with pytest.raises(ValueError, match=f"{name} stands for numbers that are not finite in torch.float16"):
        load(folder, dtype=torch.float16)
    load(folder, dtype=torch.bfloat16)


@pytest.mark.parametrize(("form", "group"), [("blocks", 128), ("rows", 0), ("awq", 128), ("words", 64)])
def test_dummy_weights_are_kept_and_those_of_one(form: str, group: int, tmp_path: Path) -> None:
    folder = save(form, tmp_path)
    config = read_model(folder)
    given: dict[str, Any] = {"load_format": "dummy", "seed": 3}
    alone, num_bytes = load(folder, **given)
    assert num_bytes < load(folder, torch_backend(), **given)[1]
    ranks = [load(folder, config=config.of_rank(2), ranks=OneOfRanks(at, 2), **given)[0] for at in (0, 1)]
    halves = [weights_of(model) for model in ranks]
    for at, weight in enumerate(weights_of(alone)):
        assert isinstance(weight, QuantisedWeight)
        assert weight.format.group == group and weight.format.scales == torch.bfloat16
        numbers = expanded(weight)
        assert 0.015 < numbers.std() < 0.025
        parts = [expanded(half[at]) for half in halves]
        if at % 2:
            assert torch.equal(torch.cat(parts, 1), numbers)
            continue
        sizes = [256, 128, 128] if at % 4 == 0 else [512, 512]
        apart = [part.split([size // 2 for size in sizes]) for part in parts]
        assert torch.equal(torch.cat([half for pair in zip(*apart, strict=True) for half in pair]), numbers)


@pytest.mark.parametrize("form", ["blocks", "rows", "gptq", "words"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_fits_counts_the_bits_that_are_kept(form: str, ranks: int, tmp_path: Path) -> None:
    """All but norms, which it leaves out."""
    folder = save(form, tmp_path)
    model = read_model(folder)
    part = model.of_rank(ranks)
    keep = keep_in_folder(folder, model, torch.bfloat16, KEEPING.keeps)
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
    keep = keep_in_folder(folder, model, torch.bfloat16, keeps)
    told = dict(on_gpus(folder, model, info, config, 8 << 30))
    for ranks in (1, 2):
        size = weight_bytes(folder, model.of_rank(ranks), 2, keep)
        assert told[f"on {ranks} GPU{'s' * (ranks > 1)}"].startswith(f"weights {_size(size)} each")


def test_a_start_is_not_refused_on_a_gpu_that_has_room_for_what_is_kept(tmp_path: Path) -> None:
    folder = save("awq", tmp_path)
    model = read_model(folder)
    keep = keep_in_folder(folder, model, torch.bfloat16, keeps)
    config = EngineConfig(model=str(folder), gpu_memory_utilization=1.0)
    room = weight_bytes(folder, model, 2, keep) + 1 + RESERVE_BYTES
    refuse_too_large(config, folder, model, 2, UNSCALED[torch.bfloat16], room, keep)
    with pytest.raises(ValueError, match="on one GPU the weights take"):
        refuse_too_large(config, folder, model, 2, UNSCALED[torch.bfloat16], room)


def test_what_is_kept_is_told_by_config_json_where_files_are_not_here(tmp_path: Path) -> None:
    folder = save("blocks", tmp_path)
    model = read_model(folder)

    def kept() -> dict[str, WeightFormat]:
        return dict(keep_in_folder(folder, model, torch.bfloat16, KEEPING.keeps)(model).formats)

    here = kept()
    (folder / "model.safetensors").unlink()
    assert {name: replace(form, scales=torch.float32) for name, form in kept().items()} == here


def test_layers_as_the_choice_of_kernels_sees_them_have_the_formats(tmp_path: Path) -> None:
    folder = save("awq", tmp_path)
    model, _ = load(folder)
    for shape, layer in zip(model.plans._kinds, model.layers, strict=False):
        assert isinstance(layer.qkv, QuantisedLinear)
        assert shape.qkv == layer.qkv.matrix
        assert shape.output.format == WeightFormat("int4", 128, True, torch.float16)


def test_a_start_says_what_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save("awq", tmp_path)
    with caplog.at_level(logging.INFO, "quire.engine"):
        load(folder, dtype=torch.bfloat16)
    assert "28 weights of layers are kept in 4 bits, as files have them; activations are not" in caplog.text
    assert "4 times the bytes" not in caplog.text


def test_a_checkpoint_of_the_bare_decoder_is_kept(tmp_path: Path) -> None:
    """Its names are without the base's prefix."""
    folder = save("words", tmp_path)
    expected = weights_of(load(folder)[0])

    def strip(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit(folder, strip)
    for weight, wanted in zip(weights_of(load(folder)[0]), expected, strict=True):
        assert isinstance(weight, QuantisedWeight)
        assert torch.equal(expanded(weight), expanded(wanted))


def test_an_adapter_is_merged_into_numbers(tmp_path: Path) -> None:
    folder = save("gptq", tmp_path)
    adapter = save_adapter(tmp_path / "adapter", lora_of("model.layers.0.mlp.down_proj", 256, 512), folder)
    config = read_model(folder, adapter=adapter)
    (ours, num_bytes), (other, expected) = (
        load(folder, backend, config=config) for backend in (KEEPING, torch_backend())
    )
    assert num_bytes == expected
    assert all(map(torch.equal, weights_of(ours), weights_of(other)))  # type: ignore[arg-type]


def test_kernels_are_compiled_for_each_kind_of_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four layers the second has one product expanded."""
    name = "model.layers.1.self_attn.o_proj.weight"
    folder, plain = save_quantised("qwen3", FLOATS["rows"], tmp_path, SIZES)
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
    kept = keep_in_folder(folder, config, dtype, KEEPING.keeps)(config)
    precompile(
        config, KEEPING, Limits(4, 16, MAX_LEN), 16, UNSCALED[dtype], torch.device("cpu"), dtype, None,
        kept.formats,
    )  # fmt: skip
    found = [isinstance(weight, QuantisedWeight) for weight in weights_of(built[0], layers=3)]
    assert [found[:4], found[4:8], found[8:]] == [[True] * 4, [True, False, True, True], [True] * 4]
