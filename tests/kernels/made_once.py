"""What takes long to make, made by one of the processes that run tests and read by all of them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

import pytest


def made_once(folders: pytest.TempPathFactory, name: str, make: Callable[[], str]) -> Any:
    """Return the JSON that `make` gives: of whoever comes first, while the others wait."""
    folder = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the run's; each process has one in it
    file = folder / f"{name}.json"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_text(make())
    return json.loads(file.read_text())
