"""Weights of layers stay in the few bits that files have, and stand for the numbers that they would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quire.engine.models.doubts import Doubts
from quire.engine.models.expansion import expand_files
from quire.engine.models.reading import read_model
from quire.engine.models.weight_files import open_weights
from quire.engine.parallel.group import OneOfRanks
from quire.kernels.backend import torch_backend
from quire.kernels.quantised.weight import QuantisedWeight, WeightFormat
from tests.models import modelopt_folder
from tests.models.kept_folder import (
    FLOATS,
    FORMS,
    LAYERS,
    SIZES,
    edit,
    expanded,
    generate,
    load,
    save,
    weights_of,
)
from tests.models.quantised_folder import configure
from tests.models.thread_ranks import Meeting, Rank, on_all


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
        weight.fill(tensor.numbers(outputs, inputs, Doubts()))
        assert torch.equal(expanded(weight), tensor[slice(*outputs), slice(*inputs)])


def pairs(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return integers of 4 bits with a sign, of two outputs a byte, in groups of 64 inputs."""
    outputs, inputs = weight.shape
    values, scales = torch.randint(-8, 8, (outputs, inputs)), torch.rand(outputs, inputs // 64) * 0.01
    packed = (values[::2] & 15) | (values[1::2] & 15) << 4
    found = {"weight": packed.to(torch.uint8), "weight_scale": scales.bfloat16()}
    return found, values * scales.bfloat16().float().repeat_interleave(64, 1)


MODELOPTS = {name: modelopt_folder.FORMS[name] for name in ("matrices", "rows", "blocks")}
MODELOPTS["pairs"] = modelopt_folder.form("W4A16_AWQ", pairs, group_size=64)


@pytest.mark.parametrize("form", MODELOPTS)
def test_what_modelopt_writes_is_kept(form: str, tmp_path: Path) -> None:
    """What its inputs are multiplied by before is not."""
    folder, plain = modelopt_folder.save_modelopt("qwen3", MODELOPTS[form], tmp_path, sizes=SIZES)
    for weight, numbers in zip(weights_of(load(folder)[0]), weights_of(load(plain)[0]), strict=True):
        assert isinstance(weight, QuantisedWeight) and isinstance(numbers, Tensor)
        assert torch.equal(expanded(weight), numbers)

    def multiply(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.pre_quant_scale"] = torch.full((512,), 2.0)

    if form == "pairs":
        edit(folder, multiply)
        ours, numbers = weights_of(load(folder)[0])[3], weights_of(load(plain)[0])[3]
        assert isinstance(ours, Tensor) and torch.equal(ours, 2 * expanded(numbers))


def test_weights_beside_scales_of_a_cache_are_kept(tmp_path: Path) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    folder = save("rows", tmp_path)
    configure(folder, FLOATS["rows"].config | {"kv_cache_scheme": scheme})
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": torch.tensor([0.5])}))
    assert all(isinstance(weight, QuantisedWeight) for weight in weights_of(load(folder)[0]))


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


def test_a_group_that_is_told_in_order_is_kept(tmp_path: Path) -> None:
    """Of GPTQ files have each input's group, in act order or not."""
    folder = save("gptq", tmp_path)
    names = load_file(folder / "model.safetensors")
    assert sum(name.endswith("g_idx") for name in names) == 7 * LAYERS
    assert all(isinstance(weight, QuantisedWeight) for weight in weights_of(load(folder)[0]))


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


@pytest.mark.parametrize(("form", "part"), [("rows", ".weight_scale"), ("gptq", ".scales")])
def test_scales_that_are_not_finite_are_refused_by_name(form: str, part: str, tmp_path: Path) -> None:
    folder, name = save(form, tmp_path), "model.layers.1.self_attn.o_proj"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name + part].view(-1)[5] = torch.inf

    edit(folder, spoil)
    with pytest.raises(ValueError, match=f"{name}.*stands for numbers that are not finite"):
        load(folder)


def test_codes_that_are_no_numbers_are_refused_by_name(tmp_path: Path) -> None:
    folder, name = save("blocks", tmp_path), "model.layers.1.mlp.gate_proj.weight"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(torch.uint8)[7, 9] = 0xFF

    edit(folder, spoil)
    with pytest.raises(ValueError, match=f"{name} stands for numbers that are not finite"):
        load(folder)


def test_numbers_that_are_too_large_for_fp16_are_refused_by_name(tmp_path: Path) -> None:
    """And not those whose scale is large, but no code."""
    folder, name = save("matrices", tmp_path), "model.layers.1.mlp.gate_proj.weight"

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
