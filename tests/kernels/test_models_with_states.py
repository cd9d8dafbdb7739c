"""Whole models whose states kernels keep: the logits are transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
from paged import HAS_GPU

from quire.kernels.backend import triton_backend
from quire.kernels.recurrence.operations import REFERENCES
from tests.models.any_model import compare

# The models are on a CPU, where no GPU's kernels run: test_window_engine.py has such a model on the GPU.
RECURRENCES = REFERENCES if HAS_GPU else triton_backend().recurrences


@pytest.mark.parametrize(
    "kind", ["qwen3_next", "qwen3_5_text", "kimi_linear", "nemotron_h", "falcon_mamba", "lfm2"]
)
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    verdict = compare(kind, tmp_path, recurrences=RECURRENCES)
    assert verdict.outcome == "equal", verdict.detail
