"""What a start and the doctor count of experts' weights in few bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.config import EngineConfig
from quire.engine.device.memory_profile import RESERVE_BYTES, refuse_too_large
from quire.engine.models.reading import read_model
from quire.engine.models.stored_weights import keep_in_folder
from quire.engine.parallel.fit import fits, weight_bytes
from quire.engine.parallel.group import OneOfRanks
from quire.kernels.backend import torch_backend
from quire.kernels.formats.kv_format import UNSCALED
from tests.models import kept_folder
from tests.models.float8_folder import save_quantised
from tests.models.kept_experts_folder import KEEPING, TAKING, experts_in, load, save
from tests.models.started_counts import assert_counted


@pytest.mark.parametrize("form", ["mxfp4", "blocks of qwen3_moe", "gptq of qwen3_moe"])
@pytest.mark.parametrize(("ranks", "whole_ones"), [(1, False), (2, False), (2, True)])
def test_what_fits_counts_the_bits_that_are_kept(
    form: str, ranks: int, whole_ones: bool, tmp_path: Path
) -> None:
    """By files, and by config.json where they are not here."""
    folder = save(form, tmp_path)
    model = read_model(folder, "transformers")
    part = model.of_rank(ranks, expert_parallel=whole_ones)
    alone = None if ranks == 1 else OneOfRanks(0, ranks)
    loaded, num_bytes = load(folder, dtype=torch.bfloat16, config=part, ranks=alone)
    assert len(experts_in(loaded)) == 2

    def counted() -> int:
        keep = keep_in_folder(folder, model, torch.bfloat16, KEEPING)
        return weight_bytes(folder, part, 2, keep)

    assert counted() == num_bytes < weight_bytes(folder, part, 2)
    (folder / "model.safetensors").unlink()
    assert counted() == pytest.approx(num_bytes, rel=0.02)  # scales may have another dtype


def test_stacks_that_are_expanded_are_not_counted_as_kept_before_files_are_here(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 128}
    folder, _ = save_quantised("gpt_oss", kept_folder.FLOATS["rows"], tmp_path, sizes)
    model = read_model(folder, "transformers")

    def counted() -> tuple[int, set[str]]:
        keep = keep_in_folder(folder, model, torch.bfloat16, KEEPING)
        kept = keep(model)
        told = {why for name, why in kept.reasons.items() if ".experts." in name}
        assert not kept.formats
        return weight_bytes(folder, model, 2, keep), told

    by_files = counted()
    (folder / "model.safetensors").unlink()
    assert counted() == by_files == (weight_bytes(folder, model, 2), {"stacks of matrices"})


def test_a_start_and_the_doctor_count_the_bits_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("mxfp4", tmp_path)
    kept = load(folder, dtype=torch.bfloat16)[1], "experts in 4 bits"
    expanded = load(folder, torch_backend(), dtype=torch.bfloat16)[1]
    assert_counted(folder, KEEPING, kept, expanded, monkeypatch)


def test_a_start_has_room_for_what_is_kept_or_says_that_weights_need_not_be_expanded(tmp_path: Path) -> None:
    folder = save("mxfp4", tmp_path)
    model = read_model(folder)
    keep = keep_in_folder(folder, model, torch.bfloat16, TAKING)
    room = weight_bytes(folder, model, 2, keep) + 1 + RESERVE_BYTES

    def start(**asked: Any) -> None:
        config = EngineConfig(model=str(folder), gpu_memory_utilization=1.0, **asked)
        own = keep_in_folder(folder, model, torch.bfloat16, TAKING, **asked)
        refuse_too_large(config, folder, model, 2, UNSCALED[torch.bfloat16], room, own)

    start()
    with pytest.raises(ValueError, match=", leave out --quantized-weights expand, or raise"):
        start(quantized_weights="expand")


def test_a_start_and_the_doctor_know_that_whole_experts_take_less(tmp_path: Path) -> None:
    """By columns four ranks expand them: the 48 inputs of each are no multiple of 32."""
    folder = save("mxfp4", tmp_path)
    model, held = read_model(folder), UNSCALED[torch.bfloat16]
    keep = keep_in_folder(folder, model, torch.bfloat16, TAKING)
    taken = weight_bytes(folder, model.of_rank(4, expert_parallel=True), 2, keep)

    def start(**asked: Any) -> None:
        config = EngineConfig(model=str(folder), gpu_memory_utilization=1.0, tensor_parallel_size=4, **asked)
        refuse_too_large(config, folder, model, 2, held, taken + 1 + RESERVE_BYTES, keep)

    start(enable_expert_parallel=True)
    with pytest.raises(ValueError, match=", have experts whole by --enable-expert-parallel, or raise"):
        start()
    found = fits(folder, model, 2, held, 1 << 30, keep, expert_parallel=True)
    assert [fit.weight_bytes for fit in found if fit.ranks == 4] == [taken]
