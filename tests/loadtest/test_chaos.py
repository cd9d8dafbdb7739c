"""Everything at once, for a minute: `make soak` is the same for an hour."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 10  # of traffic; with a start, lone answers, and attacks that have to be waited for, a minute


def test_nothing_is_left_of_a_minute_of_everything(tmp_path: Path) -> None:
    file = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "quire.loadtest.chaos", "--seconds", str(SECONDS), "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    shown = f"{done.stdout}\n{done.stderr}"
    assert file.exists(), shown
    result = json.loads(file.read_bytes())
    failed = [f"{check['name']}: {check['found']}" for check in result["checks"] if not check["passed"]]
    assert not failed, f"{failed}\n{shown}"
    assert done.returncode == 0
    assert result["redis_kills"] >= 2 and result["lies"] >= 1 and result["restarts"]
