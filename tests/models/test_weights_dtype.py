"""The dtype of a folder whose configuration names none is the one in which transformers loads it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import quire.engine.rank
from quire.engine.config import EngineConfig
from quire.engine.models.hub import FILES, TOKENIZER_FILES
from quire.engine.models.model_folders import ModelFolders
from quire.engine.models.reading import read_model
from quire.engine.progress import Reporter
from quire.engine.rank import described_folders
from tests.models.any_model import save_tiny


def change(file: Path, **fields: Any) -> None:
    raw = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))


def check(folder: Path, dtype: str) -> None:
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == getattr(torch, dtype)
    assert read_model(folder).dtype == read_model(folder, "transformers").dtype == dtype


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny("llama", tmp_path)
    change(tmp_path / "config.json", dtype=None)
    return tmp_path


def save(folder: Path, dtype: torch.dtype, **others: torch.dtype) -> dict[str, torch.Tensor]:
    """Write its weights in `dtype`, those whose name ends with another's name in that."""
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        kinds = [kind for end, kind in others.items() if name.endswith(f"{end}.weight")]
        weights[name] = weight.to(kinds[0] if kinds else dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_tell_it(folder: Path, dtype: str) -> None:
    save(folder, getattr(torch, dtype))
    check(folder, dtype)
    change(folder / "config.json", dtype="auto")
    assert read_model(folder).dtype == read_model(folder, "transformers").dtype == dtype
    change(folder / "config.json", dtype="float32")
    check(folder, "float32")


def test_the_first_weight_counts(folder: Path) -> None:
    """By its name, wherever it is in the file."""
    save(folder, torch.bfloat16, lm_head=torch.float16, norm=torch.float32)
    check(folder, "float16")


def test_the_first_of_several_files_counts_unless_their_index_names_one(folder: Path) -> None:
    weights = save(folder, torch.bfloat16, norm=torch.float32)
    (folder / "model.safetensors").unlink()
    norms = {name: weight for name, weight in weights.items() if name.endswith("norm.weight")}
    names = {"b.safetensors": norms, "a.safetensors": {k: v for k, v in weights.items() if k not in norms}}
    for name, part in names.items():
        save_file(part, folder / name, {"format": "pt"})
    places = {key: name for name, part in names.items() for key in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    check(folder, "bfloat16")
    change(index, metadata={"dtype": "float16"})
    check(folder, "float16")


def test_a_quantised_model_runs_in_bf16(folder: Path) -> None:
    save(folder, torch.float16)
    change(folder / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [8, 8]})
    assert read_model(folder).dtype == "bfloat16"


def test_weights_that_tell_a_dtype_come_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def resolve(name: str, lora: None, on_progress: Any, files: list[str] = FILES) -> ModelFolders:
        asked.append(files)
        return ModelFolders(folder)

    monkeypatch.setattr(quire.engine.rank, "resolve_folders", resolve)
    report = Reporter(lambda _: None, time.monotonic())

    def files(device: str, dtype: Any = "auto") -> list[str]:
        described_folders(EngineConfig(model="owner/name", dtype=dtype), torch.device(device), report)
        return asked[-1]

    assert files("cuda") is FILES
    assert files("cpu") is files("cuda", "bfloat16") is TOKENIZER_FILES
    change(folder / "config.json", dtype="bfloat16")
    assert files("cuda") is TOKENIZER_FILES
