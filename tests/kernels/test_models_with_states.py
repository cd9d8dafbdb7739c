"""Whole models whose states kernels keep: the logits are transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paged import HAS_GPU

from quire.kernels.backend import triton_backend
from quire.kernels.recurrence.operations import REFERENCES
from tests.models.any_model import compare

# The models are on a CPU, where no GPU's kernels run: test_window_engine.py has such a model on the GPU.
RECURRENCES = REFERENCES if HAS_GPU else triton_backend().recurrences


# Of two layers the second attends, where any does; of nemotron_h four are of as many types.
TWO = {"num_hidden_layers": 2}
KINDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "kimi_linear", "falcon_mamba", "lfm2"), TWO),
    "nemotron_h": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    verdict = compare(kind, tmp_path, recurrences=RECURRENCES, **KINDS[kind])
    assert verdict.outcome == "equal", verdict.detail
