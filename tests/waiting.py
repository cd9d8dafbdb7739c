"""Waiting for what other processes do, for as long as a busy machine may take."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 60.0  # generous: other tests run on the same cores


def until(condition: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true: {what}"
        time.sleep(0.02)
