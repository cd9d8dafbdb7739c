"""How many GPUs a model takes: told by `quire doctor`, and by a start on too few."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.engine.config import EngineConfig
from quire.engine.device.memory_profile import RESERVE_BYTES, refuse_too_large
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.engine.parallel.fit import fits, smallest, weight_bytes
from quire.engine.parallel.group import OneOfRanks
from quire.kernels.backend import torch_backend
from quire.kernels.formats.kv_format import UNSCALED
from tests.models.any_model import save_tiny

HELD = UNSCALED[torch.float32]


def loaded_bytes(folder: Path, ranks: int) -> int:
    part = read_model(folder).of_rank(ranks)
    _, num_bytes = load_model(
        folder, part, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=64,
        ranks=None if ranks == 1 else OneOfRanks(0, ranks),
    )  # fmt: skip
    return num_bytes


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [*((kind, ranks) for kind in ("gemma2", "qwen3_moe", "gpt_oss") for ranks in (1, 2)), ("bert", 1)],
)
def test_what_transformers_code_holds_is_known_before_it_is_loaded(
    kind: str, ranks: int, tmp_path: Path
) -> None:
    """With a table that is the head, too, maybe beside a bias, and experts; before anything is read."""
    save_tiny(kind, tmp_path)
    part = read_model(tmp_path).of_rank(ranks)
    assert part.implementation == "transformers"
    assert weight_bytes(tmp_path, part, 4) == loaded_bytes(tmp_path, ranks)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_start_on_too_few_gpus_names_how_many_it_takes(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    model = read_model(tmp_path)
    one, two = (weight_bytes(tmp_path, model.of_rank(ranks), 4) for ranks in (1, 2))
    budget = (one + two) // 2
    assert [fit.ranks for fit in fits(tmp_path, model, 4, HELD, budget)][:2] == [1, 2]
    assert smallest(fits(tmp_path, model, 4, HELD, budget)) == 2

    def start(ranks: int, room: int) -> None:
        config = EngineConfig(model=str(tmp_path), tensor_parallel_size=ranks, gpu_memory_utilization=1.0)
        refuse_too_large(config, tmp_path, model, 4, HELD, room + RESERVE_BYTES)

    start(2, budget)
    with pytest.raises(ValueError, match=r"on one GPU the weights take .* give --tensor-parallel-size 2"):
        start(1, budget)
    with pytest.raises(ValueError, match=r"on each of 2 GPUs the weights take .* take a smaller model"):
        start(2, 1)
