"""Folders whose weights are 8-bit floats are loaded as the numbers that those stand for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from quire.engine.models import expanded_file
from quire.engine.models.float8 import Block, Float8
from quire.engine.models.float8_files import expand_float8
from quire.engine.models.general.model import GeneralModel
from quire.engine.models.loader import Model, load_model
from quire.engine.models.quantisation import read_quantised
from quire.engine.models.reading import read_model
from quire.engine.models.weight_files import open_weights
from quire.engine.parallel.fit import weight_bytes
from quire.kernels.backend import torch_backend
from tests.models.any_model import LEAST_AGREEMENT, LENGTHS, MAX_LEN, STEPS, difference, prompts, save_tiny
from tests.models.divided_model import compare_divided
from tests.models.float8_folder import FORMS, fp8, quantise, save_quantised
from tests.models.paged_driver import PagedDriver
from tests.models.quantised_folder import MODELS, configure
from tests.models.thread_ranks import Meeting, Rank, on_all

NATIVE = ("llama", "qwen3", "mistral", "opt", "gpt2")
Generated = tuple[list[list[int]], list[Tensor]]
EVERY = slice(None)
Tensors = dict[str, Tensor]
QUERIES = "model.layers.0.self_attn.q_proj.weight"  # [192, 160]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Model, int]:
    config = read_model(folder)
    return load_model(folder, config, torch_backend(), device="cpu", dtype=dtype, max_model_len=MAX_LEN)


def generate(model: Model) -> Generated:
    return PagedDriver(model, model.config, len(LENGTHS) + 1, MAX_LEN).generate(prompts(), STEPS)


def parameters(model: GeneralModel) -> Tensors:
    return dict(model._decoder.named_parameters()) | dict(model._causal.named_parameters())


def assert_same(ours: Model, other: Model) -> Generated:
    """Assert that models have the same weights and give the same; return what.

    Transformers' loop over experts gives other last bits each time, by where a CPU has its temporaries.
    """
    (tokens, logits), expected = generate(ours), generate(other)
    assert tokens == expected[0]
    if not isinstance(ours, GeneralModel):
        assert all(map(torch.equal, logits, expected[1]))
        return tokens, logits
    assert isinstance(other, GeneralModel)
    held, wanted = parameters(ours), parameters(other)
    assert held.keys() == wanted.keys()
    assert all(torch.equal(each, wanted[name]) for name, each in held.items())
    for rows, theirs in zip(logits, expected[1], strict=True):
        torch.testing.assert_close(rows, theirs, atol=1e-4, rtol=1e-4)
    return tokens, logits


def assert_same_divided(ours: Path, other: Path, ranks: int) -> None:
    """Assert that folders of a native decoder, divided among ranks, give the same."""
    part, meeting = read_model(ours).of_rank(ranks), Meeting(ranks)

    def of_rank(folder: Path) -> Callable[[int], Generated]:
        def run(rank: int) -> Generated:
            model, _ = load_model(
                folder, replace(part, quantised=read_model(folder).quantised), torch_backend(), device="cpu",
                dtype=torch.float32, max_model_len=MAX_LEN, ranks=Rank(rank, meeting),
            )  # fmt: skip
            return PagedDriver(model, part, len(LENGTHS) + 1, MAX_LEN).generate(prompts(), STEPS)

        return run

    for (tokens, logits), expected in zip(
        on_all(meeting, of_rank(ours)), on_all(meeting, of_rank(other)), strict=True
    ):
        assert tokens == expected[0]
        assert all(map(torch.equal, logits, expected[1]))


@pytest.mark.parametrize(
    ("kind", "form"), [(("qwen3", "qwen3_moe")[i % 2], form) for i, form in enumerate(FORMS)]
)
def test_every_form_is_loaded_as_its_numbers(kind: str, form: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(kind, FORMS[form], tmp_path)
    generated = assert_same(load(quantised)[0], load(plain)[0])
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    assert difference(generated, reference) < LEAST_AGREEMENT


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (kind, ("blocks", "compressed rows")[i % 2])
        for i, kind in enumerate(MODELS)
        if kind not in ("qwen3", "qwen3_moe")
    ],
)
def test_every_kind_of_model_is_loaded_as_its_numbers(kind: str, form: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(kind, FORMS[form], tmp_path)
    assert read_model(quantised).implementation == ("native" if kind in NATIVE else "transformers")
    assert_same(load(quantised)[0], load(plain)[0])


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_numbers_are_rounded_once_to_the_dtype_asked_for(kind: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(kind, FORMS["blocks"], tmp_path)
    ours, expected = load(quantised, torch.bfloat16)[0], load(plain, torch.bfloat16)[0]
    if isinstance(ours, GeneralModel):
        assert isinstance(expected, GeneralModel)
        assert all(torch.equal(each, parameters(expected)[name]) for name, each in parameters(ours).items())
    else:
        assert_same(ours, expected)


@pytest.mark.parametrize("form", ["blocks", "compressed blocks", "rows"])
@pytest.mark.parametrize(("kind", "ranks"), [("qwen3", 2), ("llama", 4), ("gpt2", 2)])
def test_ranks_of_native_decoders_expand_their_shares(
    kind: str, ranks: int, form: str, tmp_path: Path
) -> None:
    """Blocks are cut by the shares' edges."""
    assert_same_divided(*save_quantised(kind, FORMS[form], tmp_path), ranks)


@pytest.mark.parametrize(
    ("kind", "expert_parallel", "form"),
    [
        ("gemma2", False, "blocks"),
        ("qwen3_moe", False, "compressed blocks"),
        ("qwen3_moe", True, "blocks"),
        ("qwen3_moe", False, "compressed powers"),
        ("gpt_oss", False, "blocks"),
        ("gpt_oss", False, "compressed matrices"),
        ("gpt_oss", True, "compressed blocks"),
    ],
)
def test_ranks_by_transformers_code_expand_their_shares(
    kind: str, expert_parallel: bool, form: str, tmp_path: Path
) -> None:
    quantised, plain = save_quantised(kind, FORMS[form], tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    verdict = compare_divided(quantised, reference, 2, expert_parallel=expert_parallel)
    assert verdict.outcome == "equal", verdict.detail


PARTS = [
    (),
    (slice(1, 3),),
    (EVERY, slice(130, 137)),
    (EVERY, slice(7, 7)),
    (EVERY, EVERY, slice(100, 260)),
    (slice(2, 3), slice(1, 129), slice(127, 129)),
]


@pytest.mark.parametrize("form", ["blocks", "rows", "matrices", "compressed powers"])
@pytest.mark.parametrize("part", PARTS)
def test_any_part_of_a_weight_is_read_as_its_numbers(
    part: tuple[slice, ...], form: str, tmp_path: Path
) -> None:
    """On a GPU if there is one: native decoders expand there."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    floats, scales, numbers = quantise(torch.randn(3, 300, 280), FORMS[form])
    path = tmp_path / "stack.safetensors"
    save_file({"stack": floats, "stack_scale": scales}, path)
    float8 = read_quantised({"quantization_config": FORMS[form].config}, "")
    assert float8 is not None
    (file,) = expand_float8([open_weights(path)], float8, torch.bfloat16, device)
    read = file.get_slice("stack")[part or ...]
    assert read.device.type == device.type
    assert torch.equal(read.cpu(), numbers[part].bfloat16())


def test_groups_of_layers_may_have_scales_of_different_kinds() -> None:
    rows, blocks, matrices = (FORMS[f"compressed {each}"].config for each in ("rows", "blocks", "matrices"))
    groups = {str(at): each["config_groups"]["group_0"] for at, each in enumerate((rows, blocks, matrices))}
    float8 = read_quantised({"quantization_config": rows | {"config_groups": groups}}, "")
    assert float8 == Float8(Block(48, 80), row=True, matrix=True)
    assert float8.block_of([100, 90], [3, 2]) == Block(48, 80)
    assert float8.block_of([100, 90], [100, 1]) == Block(1, 90)
    assert float8.block_of([100, 90], [1]) == Block(100, 90)
    assert float8.block_of([100, 90], [2, 2]) is None


def test_pieces_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large weight a little is expanded at a time."""
    quantised, plain = save_quantised("qwen3", FORMS["blocks"], tmp_path)
    expected = load(plain)[0]
    monkeypatch.setattr(expanded_file, "_PIECE", 1000)
    assert_same(load(quantised)[0], expected)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_scales_may_be_in_another_file_than_their_weight(kind: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(kind, FORMS["blocks"], tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    (quantised / "model.safetensors").unlink()
    files: dict[str, Tensors] = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        files["b.safetensors" if name.endswith("_scale_inv") else "a.safetensors"][name] = tensor
    for file, held in files.items():
        save_file(held, quantised / file, {"format": "pt"})
    names = {name: file for file, held in files.items() for name in held}
    (quantised / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert_same(load(quantised)[0], load(plain)[0])


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_weights_take_the_bytes_of_the_dtype_that_they_are_loaded_in(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, plain = save_quantised(kind, FORMS["blocks"], tmp_path)
    with caplog.at_level(logging.INFO, "quire.engine"):
        _, expected = load(plain, torch.bfloat16)
        assert "8-bit" not in caplog.text
        _, num_bytes = load(quantised, torch.bfloat16)
    assert "loaded as the bfloat16 numbers that they stand for, in 2 times the bytes" in caplog.text
    assert num_bytes == expected
    assert weight_bytes(quantised, read_model(quantised), 2) == weight_bytes(plain, read_model(plain), 2)


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_a_folder_that_names_no_dtype_is_of_bfloat16(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({name: each for name, each in fields.items() if name != "dtype"}))
    assert read_model(tmp_path).dtype == "float32"
    configure(tmp_path, fp8())
    assert read_model(tmp_path).dtype == "bfloat16"
