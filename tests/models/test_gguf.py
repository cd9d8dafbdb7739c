"""GGUF files are served as the folders that their models were made from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from quire.engine.models.gguf import tensors
from quire.engine.models.gguf.file import known_kind
from quire.engine.models.gguf.tensors import GgufTensor, expand_gguf
from quire.engine.models.hub import resolve_model
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.engine.models.weight_files import open_weights, weight_files
from quire.kernels.backend import torch_backend
from tests.models.any_model import LEAST_AGREEMENT, LENGTHS, MAX_LEN, STEPS, difference, prompts
from tests.models.divided_model import compare_divided
from tests.models.gguf_file import MODELS, own_cache, save_gguf
from tests.models.paged_driver import PagedDriver
from tests.models.test_float8 import EVERY, generate, load
from tests.models.thread_ranks import Meeting, Rank, on_all

__all__ = ["own_cache"]

CPU = torch.device("cpu")
# Those that transformers reads itself, each tensor as one weight.
READ_BY_TRANSFORMERS = ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "starcoder2", "gpt2")
KINDS = [kind for kind in Kind if known_kind(kind) is not None]


pytestmark = pytest.mark.usefixtures("own_cache")


def weights_of(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return all weights of a GGUF file, by the names that a folder has."""
    folder = resolve_model(str(path))
    files = expand_gguf([open_weights(each) for each in weight_files(folder)], dtype, CPU)
    return {name: file.get_tensor(name) for file in files for name in file.offset_keys()}


def with_numbers_of(path: Path, folder: Path) -> Any:
    """Return the model of a folder with the numbers that weights of a GGUF file stand for."""
    save_file(
        {name: weight.contiguous() for name, weight in weights_of(path).items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("kind", MODELS)
def test_a_file_gives_what_the_folder_of_its_model_gives(kind: str, tmp_path: Path) -> None:
    path, reference = save_gguf(kind, tmp_path)
    folder = resolve_model(str(path))
    assert read_model(folder).architecture == type(reference).__name__
    assert difference(generate(load(folder)[0]), reference) < LEAST_AGREEMENT


@pytest.mark.parametrize("kind", READ_BY_TRANSFORMERS)
def test_weights_are_those_that_transformers_reads(kind: str, tmp_path: Path) -> None:
    path, _ = save_gguf(kind, tmp_path, Kind.Q4_1)
    config = AutoConfig.from_pretrained(tmp_path / "folder")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    found = weights_of(path)
    assert {*found} == {*expected}
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe"])
def test_quantised_weights_are_loaded_as_their_numbers(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = save_gguf(kind, tmp_path, Kind.Q8_0)
    folder = resolve_model(str(path))
    config = read_model(folder)
    assert (config.quantised, config.dtype) == ("gguf", "bfloat16")
    with caplog.at_level(logging.INFO, "quire.engine"):
        model, _ = load(folder)
    assert "weights of the GGUF file are loaded as the float32 numbers" in caplog.text
    reference = with_numbers_of(path, tmp_path / "folder")
    assert difference(generate(model), reference) < LEAST_AGREEMENT


@pytest.mark.parametrize(
    ("quantised", "dtype"), [(Kind.F32, "float32"), (Kind.F16, "float16"), (Kind.BF16, "bfloat16")]
)
def test_weights_that_are_not_quantised_keep_their_type(quantised: Kind, dtype: str, tmp_path: Path) -> None:
    path, _ = save_gguf("llama", tmp_path, quantised)
    folder = resolve_model(str(path))
    assert read_model(folder).dtype == dtype
    exact = weights_of(path)
    rounded = weights_of(path, getattr(torch, dtype))
    assert all(torch.equal(rounded[name].float(), exact[name]) for name in exact if exact[name].dim() > 1)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_ranks_of_a_native_decoder_read_their_shares(kind: str, tmp_path: Path) -> None:
    path, _ = save_gguf(kind, tmp_path, Kind.Q4_0)
    folder = resolve_model(str(path))
    part, meeting = read_model(folder).of_rank(2), Meeting(2)

    def run(rank: int) -> tuple[list[list[int]], list[Tensor]]:
        model, _ = load_model(
            folder, part, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=MAX_LEN,
            ranks=Rank(rank, meeting),
        )  # fmt: skip
        return PagedDriver(model, part, len(LENGTHS) + 1, MAX_LEN).generate(prompts(), STEPS)

    reference = with_numbers_of(path, tmp_path / "folder")
    for generated in on_all(meeting, run):
        assert difference(generated, reference) < LEAST_AGREEMENT


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe"])
def test_ranks_of_transformers_code_read_their_shares(kind: str, tmp_path: Path) -> None:
    path, reference = save_gguf(kind, tmp_path)
    verdict = compare_divided(resolve_model(str(path)), reference, 2)
    assert verdict.outcome == "equal", verdict.detail


def test_a_model_may_be_split_among_files(tmp_path: Path) -> None:
    path, reference = save_gguf("qwen3", tmp_path, parts=3)
    folder = resolve_model(str(path.with_name("tiny-00002-of-00003.gguf")))
    assert [each.name for each in weight_files(folder)] == [
        f"model-0000{part}-of-00003.gguf" for part in (1, 2, 3)
    ]
    assert difference(generate(load(folder)[0]), reference) < LEAST_AGREEMENT
    path.with_name("tiny-00003-of-00003.gguf").unlink()
    with pytest.raises(ValueError, match=r"one of 00003 files, and tiny-00003-of-00003\.gguf is not beside"):
        resolve_model(str(path))


PARTS = [(), (slice(3, 50),), (EVERY, slice(71, 320)), (slice(7, 7), EVERY), (slice(9, 41), slice(13, 13))]


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_any_part_of_a_weight_is_read_as_its_numbers(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_PIECE", 1000)
    in_block, block_bytes = GGML_QUANT_SIZES[kind]
    drawn = np.random.default_rng(0).integers(
        0, 60, (73, 512 // in_block * block_bytes)
    )  # no half is infinite
    rows = drawn.astype(np.uint8)  # in which no number is infinite
    whole = torch.from_numpy(np.array(dequantize(rows, kind)))
    assert whole.shape == (73, 512)
    turned = np.random.default_rng(1).permutation(73)
    for dtype in (torch.float32, torch.bfloat16):
        weight = GgufTensor("weight", kind, rows, 512, dtype, CPU)
        ordered = GgufTensor("weight", kind, rows, 512, dtype, CPU, order=turned, less=1.0)
        transposed = GgufTensor("weight", kind, rows, 512, dtype, CPU, transposed=True)
        assert transposed.get_shape() == [512, 73]
        for part in PARTS:
            assert torch.equal(weight[part or ...], whole[part].to(dtype))
            assert torch.equal(ordered[part or ...], (whole[turned] - 1)[part].to(dtype))
            assert torch.equal(
                transposed[part[::-1]] if len(part) == 2 else transposed[...].T[part].T,
                whole[part].to(dtype).T,
            )


def test_numbers_that_a_dtype_does_not_have_are_refused_by_name() -> None:
    rows = np.full((1, 34), 0x7C, np.uint8)  # a scale that is no number
    match = r"weight stands for numbers that are not finite in torch\.bfloat16"
    with np.errstate(invalid="ignore"), pytest.raises(ValueError, match=match):
        GgufTensor("weight", Kind.Q8_0, rows, 32, torch.bfloat16, CPU)[...]
