"""`quire bench --profile`: what it says of the device's time, and the trace it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli import main
from quire.commands.bench import TRACED_STEPS
from quire.loadtest.offline.profiling import busy_and_waiting
from quire.loadtest.workloads import WORKLOADS, Work

intervals = st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda pair: (pair[0], sum(pair)))


@given(st.lists(intervals, max_size=9), st.integers(0, 9))
def test_what_is_not_busy_is_a_short_pause_or_waiting(those: list[tuple[int, int]], pause: int) -> None:
    busy, waiting = busy_and_waiting([(float(begin), float(end)) for begin, end in those], pause)
    units = {unit for begin, end in those for unit in range(begin, end)}
    ends = {edge for interval in those for edge in interval}
    gap, gaps = 0, []
    for unit in range(min(ends, default=0), max(ends, default=0)):
        if unit in units or unit in ends:  # an interval of no length ends a pause, too
            gaps.append(gap)
            gap = 0
        gap += unit not in units
    assert busy == len(units)
    assert waiting == sum(each for each in [*gaps, gap] if each > pause)


def test_a_profile_is_of_so_many_steps_and_leaves_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(
        WORKLOADS, "single", lambda: [Work([*range(32)], 2 * TRACED_STEPS)]
    )  # few steps besides
    with pytest.raises(SystemExit, match=r"^0$"):
        settings = ["--swap-space", "0", "--runs", "1", "--result-file", str(tmp_path / "results.jsonl")]
        main(["bench", "--workload", "single", *settings, "--profile", str(tmp_path)])
    shown = capsys.readouterr().out
    assert f"single: {TRACED_STEPS} steps of" in shown
    assert "waiting for the host" not in shown  # it is the host
    events = json.loads((tmp_path / "single.json").read_text())["traceEvents"]
    traced = json.loads((tmp_path / "results.jsonl").read_text())["traced"]
    assert traced["steps"] == TRACED_STEPS and 0 < traced["busy_share"] <= 1
    assert traced["waiting_us"] is None
    assert {f"step {i}" for i in range(TRACED_STEPS)} <= {event["name"] for event in events}
