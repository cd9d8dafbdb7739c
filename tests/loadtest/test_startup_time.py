"""The moments of a start, of a real server."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.loadtest import served, startup_time
from quire.service.demo import MODEL_FOLDER


def test_the_moments_of_a_start_come_in_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(startup_time, "TOKENS", 8)
    start = startup_time.measure(MODEL_FOLDER, ["--num-gpu-blocks-override", "64"], "cold", tmp_path)
    compiled = ["kernels"] if torch.cuda.is_available() else []
    assert [*start.phases_s] == ["weights", *compiled, "memory", "warm-up", "ready"]
    phases = list(start.phases_s.values())
    assert phases == sorted(phases) and start.port_s <= start.ready_s < start.first_token_s <= start.graphs_s
    assert start.device == (torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    # Of so few tokens most may come together, with no time between.
    assert 0 <= start.itl_p50_ms <= start.itl_max_ms and 0 <= start.later_itl_p50_ms <= start.later_itl_max_ms
    assert start.itl_max_ms > 0 and start.later_itl_max_ms > 0


@given(st.lists(st.floats(0, 60), min_size=1, max_size=9))
def test_of_several_starts_the_one_in_the_middle_counts(seconds: list[float]) -> None:
    start = startup_time.StartupTime(
        model="m", kernels="warm", port_s=0.0, phases_s={}, ready_s=0.0, first_token_s=0.0, graphs_s=0.0,
        itl_p50_ms=0.0, itl_max_ms=0.0, later_itl_p50_ms=0.0, later_itl_max_ms=0.0, runs=1, device="d",
        commit="c", date="d", command="startup_time",
    )  # fmt: skip
    # What else was measured is that start's own: here its last graph comes a second after its first token.
    starts = [replace(start, first_token_s=each, graphs_s=each + 1) for each in seconds]
    first = statistics.median_low(seconds)
    expected = replace(start, first_token_s=first, graphs_s=first + 1, runs=len(seconds))
    assert startup_time.middle(starts) == expected


@pytest.mark.parametrize("command", [served, startup_time])
def test_what_is_no_model_is_told_before_anything_starts(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["measure", "/nowhere"])
    monkeypatch.setattr(command, "serving", lambda *_, **__: pytest.fail("it starts"))
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main()
    assert "error: /nowhere is no folder, and no Hub id" in capsys.readouterr().err


def test_a_server_that_cannot_start_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="does not come up"):
        startup_time.measure(MODEL_FOLDER, ["--block-size", "5"], "cold", tmp_path)
