"""A process of the engine leaves signals that reach a whole group to its parent, from its beginning on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from quire.engine import child
from tests.waiting import SECONDS

MODULE = """
import signal, sys

signal.raise_signal(signal.SIGINT)
signal.raise_signal(signal.SIGTERM)
print(__name__, sys.argv[1:])
"""


def test_signals_of_a_group_are_ignored_while_modules_are_imported(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(MODULE)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        child.command("slow", "7"),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("__main__ ['7']\n", "", 0)
