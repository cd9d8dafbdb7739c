"""What is counted, and said, of models by transformers' code whose weights are rounded as they are loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping

from quire.engine.config import EngineConfig
from quire.engine.device.memory_profile import RESERVE_BYTES, refuse_too_large
from quire.engine.models.general.described import read_described
from quire.engine.models.general.dry_run import build
from quire.engine.models.general.rounded_parts import rounded_names
from quire.engine.models.quantisation import ROUNDED
from quire.engine.models.reading import read_model
from quire.engine.models.stored_weights import keep_in_folder
from quire.engine.parallel.fit import weight_bytes
from quire.engine.parallel.group import OneOfRanks
from quire.kernels.backend import torch_backend, triton_backend
from quire.kernels.formats.kv_format import UNSCALED
from tests.models.any_model import save_tiny
from tests.models.kept_products_folder import EXPANDING
from tests.models.started_counts import assert_counted
from tests.models.test_rounded_parts import KEEPING, SIZES, load


def read_rounded(folder: Path) -> Any:
    return read_model(folder, "transformers", quantization="fp8")


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next", "qwen3_moe", "deepseek_v3"])
def test_which_are_rounded_and_kept_is_told_without_files(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path, **SIZES[kind])
    model = read_rounded(tmp_path)
    here = keep_in_folder(tmp_path, model, torch.bfloat16, KEEPING)(model)
    nowhere = keep_in_folder(tmp_path, model, torch.bfloat16, torch_backend())(model)
    (tmp_path / "model.safetensors").unlink()
    assert keep_in_folder(tmp_path, model, torch.bfloat16, KEEPING)(model) == here
    assert here.formats and not nowhere.formats
    assert "no kernels here multiply bfloat16 numbers by them" in nowhere.reasons.values()
    assert nowhere.reasons.keys() == here.formats.keys() | here.reasons.keys()


@pytest.mark.parametrize(("kind", "sizes"), [("zaya", {}), ("hunyuan_v1_moe", {"num_experts": 16})])
def test_layers_of_routers_stay_as_they_are(kind: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    """Those that have others around them, too."""
    save_tiny(kind, tmp_path, **sizes)
    model = build(read_described(tmp_path))
    names = rounded_names(model, get_model_conversion_mapping(model))
    linear = {f"{name}.weight" for name, part in model.named_modules() if type(part) is nn.Linear}
    stay = {name for name in linear - names if ".layers." in name}
    assert stay and all(".mlp.gate." in name for name in stay)
    assert len(names) > 12 and not [name for name in names if ".gate." in name]


@pytest.mark.parametrize(("kind", "weights"), [("llama4_text", 8), ("gpt_oss", 8), ("granitemoehybrid", 8)])
def test_experts_that_stay_as_they_are_are_told(kind: str, weights: int, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    model = read_rounded(tmp_path)
    for _ in ("by files", "by config.json"):
        kept = keep_in_folder(tmp_path, model, torch.bfloat16, KEEPING)(model)
        assert list(kept.reasons.values()).count("experts, which are not rounded") == weights
        (tmp_path / "model.safetensors").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_fits_counts_the_bits_that_are_kept(kind: str, ranks: int, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path, **SIZES[kind])
    model = read_rounded(tmp_path)
    part, alone = model.of_rank(ranks), None if ranks == 1 else OneOfRanks(0, ranks)
    num_bytes = load(tmp_path, dtype=torch.bfloat16, config=part, ranks=alone)[1]
    for _ in ("by files", "by config.json"):
        keep = keep_in_folder(tmp_path, model, torch.bfloat16, KEEPING)
        assert weight_bytes(tmp_path, part, 2, keep) == num_bytes < weight_bytes(tmp_path, part, 2)
        (tmp_path / "model.safetensors").unlink(missing_ok=True)


def test_a_start_and_the_doctor_count_the_bits_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("gemma3_text", tmp_path, **SIZES["gemma3_text"])
    kept = load(tmp_path, dtype=torch.bfloat16)[1], "layers' products in 8 bits"
    expanded = load(tmp_path, EXPANDING, dtype=torch.bfloat16)[1]
    assert_counted(tmp_path, KEEPING, kept, expanded, monkeypatch, quantization="fp8")


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_moe"])
def test_a_start_that_would_have_room_for_rounded_weights_says_that_they_can_be(
    kind: str, tmp_path: Path
) -> None:
    save_tiny(kind, tmp_path, **SIZES[kind])
    model = read_model(tmp_path)
    config = EngineConfig(model=str(tmp_path), gpu_memory_utilization=1.0)
    keep = keep_in_folder(tmp_path, replace(model, quantised=ROUNDED), torch.bfloat16, triton_backend())
    least, most = (weight_bytes(tmp_path, model, 2, *each) for each in ((keep,), ()))
    assert least < most
    told = "have its weights rounded to 8 bits by --quantization fp8"
    for room, is_said in ((most, True), (least + 1, True), (least, False)):
        with pytest.raises(ValueError, match="the weights take") as refused:
            refuse_too_large(config, tmp_path, model, 2, UNSCALED[torch.bfloat16], room + RESERVE_BYTES)
        assert (told in str(refused.value)) == is_said
