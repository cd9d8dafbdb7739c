"""--quantization fp8 of models by transformers' code rounds weights of linear layers and of experts."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.models.general.kept_linear import KeptLinear
from quire.engine.models.general.model import GeneralModel
from quire.engine.models.reading import read_model
from quire.engine.parallel.group import OneOfRanks
from tests.models import kept_experts_folder, kept_products_folder
from tests.models.adapter_folder import lora_of, save_adapter, weights
from tests.models.any_model import save_tiny
from tests.models.kept_experts_folder import OF_EXPERTS, expanded_in, experts_in, same
from tests.models.kept_folder import edit, generate, generate_on_ranks
from tests.models.kept_products_folder import EXPANDING, KINDS, MOST_APART, layers_in
from tests.models.quantised_folder import configure
from tests.models.rounded_folder import is_rounded_by_transformers, rounded, save_general
from tests.models.test_rounded import MEASURED

KEEPING = replace(EXPANDING, keeps=lambda form, dtype: True, keeps_experts=lambda form, dtype: True)
BACKENDS = pytest.mark.parametrize("backend", [KEEPING, EXPANDING], ids=["kept", "expanded"])
SIZES = KINDS | {kind: OF_EXPERTS[kind] for kind in ("qwen3_moe", "mixtral", "deepseek_v3")}
TWO = {"num_hidden_layers": 2}
OTHERS: dict[str, dict[str, Any]] = {"gpt_oss": {"hidden_size": 256} | TWO, "opt": TWO, "falcon_h1": TWO}
EVERY = SIZES | OTHERS


def load(folder: Path, backend: Any = KEEPING, **given: Any) -> tuple[GeneralModel, int]:
    """Load a folder whose weights are to be rounded."""
    adapter = given.pop("adapter", None)
    if "config" not in given:
        given["config"] = read_model(folder, "transformers", adapter=adapter, quantization="fp8")
    return kept_products_folder.load(folder, backend, **given)


def load_plain(folder: Path, **given: Any) -> GeneralModel:
    return kept_products_folder.load(folder, EXPANDING, **given)[0]


def numbers_in(model: GeneralModel) -> dict[str, Tensor]:
    """Return the numbers of linear layers that have some yet, kept or not."""
    found = {name: layer.weight for name, layer in layers_in(model).items()}
    return {name: weight for name, weight in found.items() if weight.numel()}


def of_experts(model: GeneralModel) -> list[list[Tensor]]:
    return kept_experts_folder.kept_in(model) or expanded_in(model)


def assert_same(model: GeneralModel, other: GeneralModel) -> None:
    ours, theirs = numbers_in(model), numbers_in(other)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
    assert not of_experts(other) or same(of_experts(model), of_experts(other))


def assert_close(ours: Any, other: Any) -> None:
    (tokens, logits), (expected, theirs) = ours, other
    assert tokens == expected
    for each, wanted in zip(logits, theirs, strict=True):
        torch.testing.assert_close(each, wanted, atol=MOST_APART, rtol=1e-3)


@pytest.mark.parametrize("kind", EVERY)
def test_answers_are_those_of_a_folder_of_the_rounded_numbers(kind: str, tmp_path: Path) -> None:
    plain, of_rounded = save_general(kind, tmp_path, **EVERY[kind])
    other = load_plain(of_rounded)
    (kept, num_bytes), (all_numbers, more) = load(plain), load(plain, EXPANDING)
    assert_same(all_numbers, other)
    assert_same(kept, other)
    expected = generate(other)
    assert_close(generate(all_numbers), expected)
    assert_close(generate(kept), expected)
    unrounded = generate(load_plain(plain))[1]
    assert not all(map(torch.allclose, unrounded, expected[1]))
    assert not all_numbers.kept
    if kind in SIZES:
        assert kept.kept and num_bytes < more
        assert bool(experts_in(kept)) == bool(of_experts(other))


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_in_16_bits_are_the_same_kept_or_not(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """What is rounded is what files have, and not what the model's dtype makes of it."""
    plain, of_rounded = save_general(kind, tmp_path, **SIZES[kind])
    other = load_plain(of_rounded, dtype=dtype)
    for backend in (KEEPING, EXPANDING):
        model = load(plain, backend, dtype=dtype)[0]
        ours, theirs = numbers_in(model), numbers_in(other)
        assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
        pairs = zip(of_experts(model), of_experts(other), strict=True)
        assert all(torch.equal(a.to(dtype), b) for one, two in pairs for a, b in zip(one, two, strict=True))


def test_all_else_is_as_files_have_it(tmp_path: Path) -> None:
    plain, _ = save_general("qwen3_next", tmp_path, **SIZES["qwen3_next"])
    ours, other = load(plain)[0], load_plain(plain)
    assert torch.equal(ours.embedding, other.embedding)
    dense = {name for name, layer in layers_in(ours).items() if not isinstance(layer, KeptLinear)}
    assert {name.rpartition(".")[2] for name in dense} == {"in_proj_ba", "shared_expert_gate"}
    theirs = dict(other._decoder.named_parameters())
    for name, weight in ours._decoder.named_parameters():
        if weight.numel():
            assert torch.equal(weight, theirs[name])


RANKED = ["gemma3_text", "phi3", "starcoder2", "qwen3_5_text", "qwen3_moe"]


@BACKENDS
@pytest.mark.parametrize("kind", RANKED)
def test_ranks_have_scales_of_whole_rows(kind: str, backend: Any, tmp_path: Path) -> None:
    plain, _ = save_general(kind, tmp_path, **SIZES[kind])
    whole, _ = load(plain, backend)
    part = whole.config.of_rank(2)
    expected, (ranks, generated) = generate(whole), generate_on_ranks(plain, part, 2, backend)
    for ours in generated:
        assert_close(ours, expected)
    assert_parts_are_of(whole, ranks)


def load_part(folder: Path, backend: Any, part: Any, rank: int, **given: Any) -> GeneralModel:
    return load(folder, backend, config=part, ranks=OneOfRanks(rank, part.ranks), **given)[0]


def assert_parts_are_of(whole: GeneralModel, ranks: list[GeneralModel]) -> None:
    """Of products behind others ranks have the numbers of one, as of experts' down projections."""
    numbers, parts = numbers_in(whole), [numbers_in(rank) for rank in ranks]
    names = [name for name in numbers if name.endswith(("o_proj", "down_proj", "c_proj", "out_proj"))]
    assert names
    for name in names:
        here = [each[name] for each in parts]
        dim = 0 if here[0].shape[0] < len(numbers[name]) else 1  # outputs, of a delta net's last product
        assert torch.equal(torch.cat(here, dim), numbers[name])
    of_ranks = [of_experts(rank) for rank in ranks]
    for at, (_, down, *_) in enumerate(of_experts(whole)):
        assert torch.equal(torch.cat([each[at][1] for each in of_ranks], 2), down)


@BACKENDS
def test_ranks_have_whole_experts_as_one_has_them(backend: Any, tmp_path: Path) -> None:
    plain, _ = save_general("qwen3_moe", tmp_path, **SIZES["qwen3_moe"])
    whole, _ = load(plain, backend)
    part, expected = whole.config.of_rank(2, expert_parallel=True), generate(whole)
    ranks, generated = generate_on_ranks(plain, part, 2, backend)
    for ours in generated:
        assert_close(ours, expected)
    drawn = [load_part(plain, backend, part, rank, load_format="dummy") for rank in range(2)]
    for model, divided in ((whole, ranks), (load(plain, backend, load_format="dummy")[0], drawn)):
        each = zip(*map(of_experts, divided), strict=True)
        parts = [[torch.cat(both) for both in zip(*layer, strict=True)] for layer in each]
        assert same(parts, of_experts(model))


@pytest.mark.parametrize("kind", RANKED)
def test_dummy_weights_are_rounded_and_those_of_one(kind: str, tmp_path: Path) -> None:
    """Kept, expanded, and of ranks; all else is the same, too."""
    save_tiny(kind, tmp_path, **SIZES[kind])
    given: dict[str, Any] = {"load_format": "dummy", "seed": 3}
    (kept, num_bytes), (numbers, more) = (load(tmp_path, each, **given) for each in (KEEPING, EXPANDING))
    assert kept.kept and not numbers.kept and num_bytes < more
    assert_same(kept, numbers)
    assert torch.equal(kept.embedding, numbers.embedding)
    assert_close(generate(kept), generate(numbers))
    drawn = [weight for name, weight in numbers_in(numbers).items() if len(weight) % 16 == 0]
    every = drawn + [weight for layer in of_experts(numbers) for weights in layer for weight in weights]
    for weight in every:
        assert float(weight.std()) == pytest.approx(0.02, rel=0.1)
        torch.testing.assert_close(rounded(weight), weight, atol=0, rtol=1e-6)  # what it has, it stands for
        assert len(torch.unique(weight[0])) < 256
    other = load(tmp_path, EXPANDING, **(given | {"seed": 4}))[0]
    assert not torch.equal(drawn[0], next(iter(numbers_in(other).values())))
    part = kept.config.of_rank(2)
    for backend in (KEEPING, EXPANDING):
        ranks = [load_part(tmp_path, backend, part, rank, **given) for rank in range(2)]
        assert_parts_are_of(kept, ranks)
        assert torch.equal(
            torch.cat([rank.embedding for rank in ranks])[: len(kept.embedding)], kept.embedding
        )


@BACKENDS
@pytest.mark.parametrize(
    ("kind", "module", "outputs", "inputs"),
    [
        ("gemma3_text", "model.layers.1.mlp.down_proj", 256, 512),
        ("qwen3_moe", "model.layers.1.mlp.experts.1.down_proj", 256, 256),
    ],
)
def test_an_adapter_is_merged_before_weights_are_rounded(
    kind: str, module: str, outputs: int, inputs: int, backend: Any, tmp_path: Path
) -> None:
    plain, _ = save_general(kind, tmp_path, **SIZES[kind])
    lora = lora_of(module, outputs, inputs)
    adapter = save_adapter(tmp_path / "adapter", lora, plain)
    ours = load(plain, backend, adapter=adapter)[0]
    added = lora[f"{module}.lora_B.weight"] @ lora[f"{module}.lora_A.weight"] * 1.5

    def merge(tensors: dict[str, Tensor]) -> None:
        tensors[f"{module}.weight"] += added
        tensors |= {n: rounded(each) for n, each in tensors.items() if is_rounded_by_transformers(n, each)}

    assert len(ours.kept) == len(load(plain, backend)[0].kept)
    edit(plain, merge)
    merged = load_plain(plain)
    for name, weight in numbers_in(ours).items():
        torch.testing.assert_close(weight, numbers_in(merged)[name])
    for one, two in zip(of_experts(ours), of_experts(merged), strict=True):
        torch.testing.assert_close(one, two)


def test_weights_beside_scales_of_a_cache_are_rounded(tmp_path: Path) -> None:
    plain, of_rounded = save_general("gemma3_text", tmp_path, **SIZES["gemma3_text"])
    configure(plain, MEASURED)
    assert_same(load(plain)[0], load_plain(of_rounded))


@BACKENDS
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gemma3_text", "model.layers.1.self_attn.o_proj.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.1.down_proj.weight"),
    ],
)
def test_numbers_that_are_not_finite_are_refused_by_name(
    kind: str, name: str, rank: int, backend: Any, tmp_path: Path
) -> None:
    """On whichever rank they would be, since a row has one scale."""
    plain, _ = save_general(kind, tmp_path, **SIZES[kind])

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name][5, 7] = torch.inf

    edit(plain, spoil)
    part = read_model(plain, "transformers", quantization="fp8").of_rank(2)
    with pytest.raises(ValueError, match=f"{name} stands for numbers that are not finite"):
        load_part(plain, backend, part, rank)


@BACKENDS
def test_what_files_have_in_other_types_or_shapes_is_refused_by_name(backend: Any, tmp_path: Path) -> None:
    plain, _ = save_general("gemma3_text", tmp_path, **SIZES["gemma3_text"])
    name = "model.layers.1.self_attn.o_proj.weight"
    whole = weights(plain)[name]
    edit(plain, lambda tensors: tensors.update({name: whole.to(torch.int8)}))
    with pytest.raises(ValueError, match=f"{name} holds I8; only F64, F32, F16, BF16 are rounded: leave out"):
        load(plain, backend)
    edit(plain, lambda tensors: tensors.update({name: whole[:, :128].contiguous()}))
    with pytest.raises(ValueError, match=rf"{name} has shape \[256, 128\], but config.json asks for"):
        load(plain, backend)


def test_experts_in_a_stack_that_others_have_in_matrices_are_refused_by_name(tmp_path: Path) -> None:
    plain, _ = save_general("qwen3_moe", tmp_path, **SIZES["qwen3_moe"])
    name = "model.layers.1.mlp.experts"

    def stack(tensors: dict[str, Tensor]) -> None:
        downs = [tensors.pop(f"{name}.{expert}.down_proj.weight") for expert in range(4)]
        tensors[f"{name}.down_proj"] = torch.stack(downs)

    edit(plain, stack)
    with pytest.raises(ValueError, match=f"{name}.down_proj has the experts of a layer in one stack"):
        load(plain)


def test_a_start_says_what_is_rounded_and_what_of_it_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny("gpt_oss", tmp_path, **OTHERS["gpt_oss"])
    with caplog.at_level(logging.INFO, "quire.engine"):
        load(tmp_path)
    told = (
        "weights are rounded to 8-bit floats, a scale for each row: answers are not those of the folder's "
        "own numbers; 6 of layers are kept so"
    )
    assert told in caplog.messages
    assert (
        "others are loaded as float32 numbers: experts, which are not rounded (4), 64 inputs, no multiple of "
        "128 (2)"
    ) in caplog.messages
    caplog.clear()
    with caplog.at_level(logging.INFO, "quire.engine"):
        load(tmp_path, EXPANDING)
    assert caplog.messages[0].endswith("own numbers; those of layers are loaded as float32 numbers")
