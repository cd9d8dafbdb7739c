"""Rotary positions whose frequencies transformers chooses by the longest sequence of a call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.kernels.backend import torch_backend
from tests.models.any_model import LENGTHS, MAX_LEN, STEPS, compare, difference, prompts, tiny_model
from tests.models.paged_driver import PagedDriver

LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "attention_factor": 1.2,
}
PHI3 = LONG | {"short_factor": [1.0, 1.2] * 4, "long_factor": [2.0, 3.0] * 4}
PHIMOE = PHI3 | {"short_mscale": 1.1, "long_mscale": 1.4}
BY_KIND = {"sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}, "full_attention": PHI3}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}


def trained(kind: str, rope: dict[str, Any], length: int) -> dict[str, Any]:
    """Return what a configuration says of a model that was trained on sequences of a length."""
    trained = {"original_max_position_embeddings": length}
    if "rope_type" not in rope:  # by kind of layer
        return {"rope_parameters": {layers: each | trained for layers, each in rope.items()}}
    return {"rope_parameters": rope | trained} | (trained if kind == "phi3" else {})


@pytest.mark.parametrize(
    ("kind", "rope"), [("phi3", PHI3), ("phimoe", PHIMOE), ("gemma3_text", BY_KIND), ("gpt_neox", DYNAMIC)]
)
def test_sequences_up_to_the_length_of_training(kind: str, rope: dict[str, Any], tmp_path: Path) -> None:
    verdict = compare(kind, tmp_path, **trained(kind, rope, MAX_LEN))
    assert verdict.outcome == "equal", verdict
    assert not verdict.reads  # a CUDA graph may hold it


@pytest.mark.parametrize(("kind", "rope"), [("phi3", PHI3), ("phimoe", PHIMOE), ("gemma3_text", BY_KIND)])
def test_sequences_beyond_it_do_not_depend_on_those_beside_them(
    kind: str, rope: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All are turned by the factors of long ones, as transformers turns those that are long."""
    reference = tiny_model(kind, tmp_path, **trained(kind, rope, 32))
    parameters = reference.config.rope_parameters
    for each in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if "original_max_position_embeddings" in each:
            each["original_max_position_embeddings"] = 0  # so that it takes every sequence for a long one
    if hasattr(reference.config, "original_max_position_embeddings"):
        reference.config.original_max_position_embeddings = 0
    config = read_model(tmp_path)
    model, _ = load_model(
        tmp_path, config, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=MAX_LEN
    )
    driver = PagedDriver(model, config, len(LENGTHS) + 1, MAX_LEN)
    assert difference(driver.generate(prompts(), STEPS), reference) < 1e-3
    assert "--max-model-len 32 serves shorter ones" in caplog.text
