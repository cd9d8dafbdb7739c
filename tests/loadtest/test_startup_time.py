"""The moments of a start, of a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loadtest import startup_time
from service.demo import MODEL_FOLDER


def test_the_moments_of_a_start_come_in_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(startup_time, "TOKENS", 8)
    start = startup_time.measure(MODEL_FOLDER, ["--num-gpu-blocks-override", "64"], "cold", tmp_path)
    compiled = ["kernels"] if torch.cuda.is_available() else []
    assert [*start.phases_s] == ["weights", *compiled, "memory", "warm-up", "ready"]
    phases = list(start.phases_s.values())
    assert phases == sorted(phases) and start.port_s <= start.ready_s < start.first_token_s <= start.graphs_s
    assert 0 < start.itl_p50_ms <= start.itl_max_ms and 0 < start.later_itl_p50_ms <= start.later_itl_max_ms


def test_a_server_that_cannot_start_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="does not come up"):
        startup_time.measure(MODEL_FOLDER, ["--block-size", "5"], "cold", tmp_path)
