"""Weights that are not quantised are rounded to 8-bit floats as they are loaded: --quantization fp8."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.models.reading import read_model
from quire.engine.parallel.group import OneOfRanks
from quire.kernels.backend import torch_backend
from quire.kernels.quantised.weight import QuantisedWeight
from tests.models.adapter_folder import lora_of, save_adapter
from tests.models.kept_folder import KEEPING, LAYERS, edit, expanded, generate, load, weights_of
from tests.models.quantised_folder import configure
from tests.models.rounded_folder import rounded, save_plain
from tests.models.thread_ranks import Meeting, Rank, on_all

MEASURED = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}


def load_rounded(folder: Path, backend: Any = KEEPING, **given: Any) -> Any:
    config = read_model(folder, adapter=given.pop("adapter", None), quantization="fp8")
    return load(folder, backend, config=config, **given)


def numbers_of(model: Any) -> list[Tensor]:
    return [expanded(weight) for weight in weights_of(model)]


def assert_same(model: Any, other: Any) -> None:
    assert all(map(torch.equal, numbers_of(model), numbers_of(other)))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_answers_are_those_of_a_folder_of_the_rounded_numbers(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    plain, of_rounded = save_plain(kind, tmp_path, dtype)
    other = load(of_rounded)[0]
    kept, all_numbers = load_rounded(plain)[0], load_rounded(plain, torch_backend())[0]
    for model, as_kept in ((kept, True), (all_numbers, False)):
        assert all(isinstance(weight, QuantisedWeight) == as_kept for weight in weights_of(model))
        assert_same(model, other)
    (tokens, logits), (expected, theirs) = generate(all_numbers), generate(other)
    assert tokens == expected == generate(kept)[0]
    assert all(map(torch.equal, logits, theirs))
    assert not torch.equal(numbers_of(load(plain)[0])[0], numbers_of(kept)[0])


@pytest.mark.parametrize("keeping", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_in_16_bits_are_the_same_kept_or_not(
    dtype: torch.dtype, keeping: bool, tmp_path: Path
) -> None:
    plain, of_rounded = save_plain("qwen3", tmp_path, torch.bfloat16)
    model = load_rounded(plain, KEEPING if keeping else torch_backend(), dtype=dtype)[0]
    for weight, numbers in zip(weights_of(model), weights_of(load(of_rounded, dtype=dtype)[0]), strict=True):
        assert torch.equal(expanded(weight).to(dtype), expanded(numbers))


@pytest.mark.parametrize("backend", [KEEPING, torch_backend()], ids=["kept", "expanded"])
def test_ranks_have_scales_of_whole_rows(backend: Any, tmp_path: Path) -> None:
    plain, _ = save_plain("qwen3", tmp_path)
    config, meeting = read_model(plain, quantization="fp8"), Meeting(2)

    def run(rank: int) -> tuple[list[list[int]], list[Tensor]]:
        model, _ = load(plain, backend, config=config.of_rank(2), ranks=Rank(rank, meeting))
        return generate(model)[0], numbers_of(model)

    whole = load_rounded(plain, backend)[0]
    ranks = on_all(meeting, run)
    assert all(tokens == generate(whole)[0] for tokens, _ in ranks)
    for at, numbers in enumerate(numbers_of(whole)):
        if at % 2:  # of the products out of attention and down ranks have some of the inputs
            assert torch.equal(torch.cat([weights[at] for _, weights in ranks], 1), numbers)


def test_what_cannot_be_kept_is_the_same_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of products whose inputs are no whole lines, and where weights are to be expanded."""
    plain, of_rounded = save_plain("qwen3", tmp_path, hidden_size=160)
    with caplog.at_level(logging.INFO, "quire.engine"):
        model = load_rounded(plain)[0]
    kept = [isinstance(weight, QuantisedWeight) for weight in weights_of(model)]
    assert kept == [False, True, False, True] * LAYERS
    assert (
        "weights are rounded to 8-bit floats, a scale for each row: answers are not those of the folder's "
        f"own numbers; {2 * LAYERS} of layers are kept so"
    ) in caplog.messages
    why = f"others are loaded as float32 numbers: 160 inputs, no multiple of 128 ({5 * LAYERS})"
    assert why in caplog.messages
    assert_same(model, load(of_rounded)[0])
    caplog.clear()
    with caplog.at_level(logging.INFO, "quire.engine"):
        all_numbers = load_rounded(plain, quantized_weights="expand")[0]
    assert not any(isinstance(weight, QuantisedWeight) for weight in weights_of(all_numbers))
    assert caplog.messages[0].endswith("own numbers; those of layers are loaded as float32 numbers")
    assert f"no weights are kept in few bits: --quantized-weights is expand ({7 * LAYERS})" in caplog.messages
    assert_same(all_numbers, model)


def test_all_but_weights_of_layers_are_as_files_have_them(tmp_path: Path) -> None:
    plain, _ = save_plain("qwen3", tmp_path)
    ours, other = load_rounded(plain)[0], load(plain)[0]
    assert torch.equal(ours.embedding, other.embedding)
    assert torch.equal(ours.head, other.head)


def test_a_checkpoint_of_the_bare_decoder_is_rounded(tmp_path: Path) -> None:
    """Its names are without the base's prefix."""
    plain, of_rounded = save_plain("qwen3", tmp_path)

    def strip(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit(plain, strip)
    for backend in (KEEPING, torch_backend()):
        assert_same(load_rounded(plain, backend)[0], load(of_rounded)[0])


def test_weights_beside_scales_of_a_cache_are_rounded(tmp_path: Path) -> None:
    plain, of_rounded = save_plain("qwen3", tmp_path)
    configure(plain, MEASURED)
    assert_same(load_rounded(plain)[0], load(of_rounded)[0])
    named = read_model(plain, quantization="modelopt")
    assert named == read_model(plain)


@pytest.mark.parametrize("backend", [KEEPING, torch_backend()], ids=["kept", "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_merged_before_weights_are_rounded(
    backend: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    """What is rounded is what the merged model has in the dtype that it runs in."""
    plain, _ = save_plain("qwen3", tmp_path)
    adapter = save_adapter(tmp_path / "adapter", lora_of("model.layers.0.mlp.down_proj", 256, 512), plain)
    ours = numbers_of(load_rounded(plain, backend, adapter=adapter, dtype=dtype)[0])
    merged = load(plain, config=read_model(plain, adapter=adapter), dtype=dtype)[0]
    sources = numbers_of(load(plain)[0])
    before, sources[3] = sources[3], expanded(weights_of(merged)[3])
    for numbers, source in zip(ours, sources, strict=True):
        assert torch.equal(numbers.to(dtype), rounded(source).to(dtype))
    assert not torch.equal(rounded(before).to(dtype), ours[3].to(dtype))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("backend", [KEEPING, torch_backend()], ids=["kept", "expanded"])
@pytest.mark.parametrize("rank", [0, 1])
def test_numbers_that_are_not_finite_are_refused_by_name(
    value: float, backend: Any, rank: int, tmp_path: Path
) -> None:
    """On whichever rank they would be, since a row has one scale."""
    plain, _ = save_plain("qwen3", tmp_path)
    name = "model.layers.1.self_attn.o_proj.weight"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name][5, 7] = value

    edit(plain, spoil)
    part = read_model(plain, quantization="fp8").of_rank(2)
    with pytest.raises(ValueError, match=f"{name} stands for numbers that are not finite"):
        load(plain, backend, config=part, ranks=OneOfRanks(rank, 2))


def test_what_files_have_in_other_types_is_refused_by_name(tmp_path: Path) -> None:
    plain, _ = save_plain("qwen3", tmp_path)
    name = "model.layers.1.self_attn.o_proj.weight"
    edit(plain, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(ValueError, match=f"{name} holds I8; only F64, F32, F16, BF16 are supported"):
        load_rounded(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_are_rounded_and_those_of_one(dtype: torch.dtype, tmp_path: Path) -> None:
    plain, _ = save_plain("qwen3", tmp_path)
    given: dict[str, Any] = {"load_format": "dummy", "seed": 3, "dtype": dtype}
    kept, num_bytes = load_rounded(plain, **given)
    all_numbers, more = load_rounded(plain, torch_backend(), **given)
    assert num_bytes < more
    config = read_model(plain, quantization="fp8").of_rank(2)
    drawn = load(plain, torch_backend(), **given)[0]
    halves = [
        [
            numbers_of(load(plain, backend, config=config, ranks=OneOfRanks(at, 2), **given)[0])
            for at in (0, 1)
        ]
        for backend in (KEEPING, torch_backend())
    ]
    for at, (weight, numbers) in enumerate(zip(weights_of(kept), weights_of(all_numbers), strict=True)):
        assert isinstance(weight, QuantisedWeight) and isinstance(numbers, Tensor)
        assert torch.equal(expanded(weight).to(dtype), numbers)
        assert 0.015 < numbers.float().std() < 0.025
        assert torch.equal(numbers, rounded(expanded(weights_of(drawn)[at])).to(dtype))
        if at % 2:
            for parts in halves:
                whole = torch.cat([half[at] for half in parts], 1)
                assert torch.equal(whole.to(dtype), numbers)
