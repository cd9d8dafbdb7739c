"""Commands side by side: what hangs or fails loses nothing of the others, and leaves no process behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from quire.loadtest.side_by_side import Command, run
from tests.waiting import until

GRANDCHILD = (
    "import subprocess, sys; from pathlib import Path;"
    "child = subprocess.Popen(['sleep', '1000']);"
    "Path(sys.argv[1]).write_text(str(child.pid)); print('begun'); child.wait()"
)


def test_each_has_its_own_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pid = tmp_path / "pid"
    commands = [
        Command(["-c", GRANDCHILD, str(pid)], seconds=3),
        Command(["-c", "raise SystemExit('no such thing')"], seconds=60),
        Command(["-c", "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])"], seconds=60, gpu=1),
    ]
    hung, failed, well = run(commands, time.monotonic() + 60)
    assert (hung.reason, hung.last_lines) == ("TIME IS UP", ["begun"])
    assert (failed.reason, failed.last_lines) == ("FAILED with exit code 1", ["no such thing"])
    assert (well.reason, well.last_lines) == (None, ["sees 1"])
    until(lambda: not Path("/proc", pid.read_text(), "exe").exists(), "the hung command has left nothing")
    assert "= TIME IS UP after" in capsys.readouterr().out


def test_nothing_begins_to_run_on_when_all_time_is_up() -> None:
    (late,) = run([Command(["-c", "input()"], seconds=60)], time.monotonic() - 1)
    assert late.reason == "TIME IS UP"
