"""The GPUs that an engine starts on."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from quire.engine import rank
from quire.engine.config import EngineConfig
from quire.engine.device import choice
from quire.engine.startup import start_engine
from quire.kernels.gpu import Gpu
from tests.kernels.gpus import GPUS


@pytest.mark.parametrize("flag", ["cuda", "auto"])
def test_one_too_old_is_refused_by_name_before_a_model_is_looked_for(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choice, "gpu_of", lambda device: Gpu("Tesla T4", (7, 5), 65536, 40))
    monkeypatch.setattr(rank, "resolve_folders", found := Mock())
    refused = (
        r"^Tesla T4 \(sm_75\) is too old: Quire needs compute capability 8\.0 \(Ampere\) or later; "
        "use --device cpu$"
    )
    with pytest.raises(ValueError, match=refused):
        start_engine(EngineConfig(model="any", device=flag))
    assert not found.called
    assert choice.choose_device(EngineConfig(model="any", device="cpu")) == torch.device("cpu")


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_others_are_taken(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choice, "gpu_of", lambda device: gpu)
    for flag in ("cuda", "auto"):
        assert choice.choose_device(EngineConfig(model="any", device=flag)) == torch.device("cuda")
