"""That a start and the doctor count the bits in which weights are kept, of any folder that has some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.doctor import _size, describe, on_gpus
from quire.engine.config import EngineConfig, EngineInfo
from quire.engine.models.reading import read_model
from quire.engine.startup import start_engine
from quire.kernels.backend import Backend


def assert_counted(
    folder: Path,
    keeping: Backend,
    kept: tuple[int, str],
    expanded: int,
    patch: pytest.MonkeyPatch,
    **asked: Any,
) -> None:
    """Start a folder's model on a CPU in bf16, by a backend that keeps weights as a GPU's does.

    kept: bytes of all weights then, and what is told of those that are kept. expanded: bytes of all weights
    where none are. asked: further settings.
    """
    patch.setattr("quire.engine.rank.torch_backend", lambda: keeping)
    num_bytes, what = kept
    info, told = _started(folder, **asked)
    assert (info.weight_bytes, info.kept_bits) == (num_bytes, (int(what.split()[-2]),))
    assert told["weights"] == f"{_size(num_bytes)} in bfloat16, and those of {what}"
    assert told["on 1 GPU"].startswith(f"weights {_size(num_bytes)} each")
    info, told = _started(folder, quantized_weights="expand", **asked)
    assert (info.weight_bytes, info.kept_bits) == (expanded, ())
    assert told["weights"] == f"{_size(expanded)} in bfloat16"
    assert told["on 1 GPU"].startswith(f"weights {_size(expanded)} each")


def _started(folder: Path, **asked: Any) -> tuple[EngineInfo, dict[str, str]]:
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="bfloat16", max_model_len=64, num_gpu_blocks_override=20,
        preemption_mode="recompute", **asked,
    )  # fmt: skip
    info = start_engine(config)[1]
    model = read_model(folder, quantization=config.quantization)
    return info, dict(describe(info)) | dict(on_gpus(folder, model, info, config, 8 << 30))
