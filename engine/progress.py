"""What is told of a start: its phases, and how far each is."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.engine.config import Phase, Progress


class Reporter:
    """Turns counts into Progress events that carry the seconds since the start."""

    def __init__(self, on_progress: Callable[[Progress], None], begin: float) -> None:
        self._on_progress = on_progress
        self._begin = begin

    def phase(self, phase: Phase, unit: str) -> Callable[[int, int], None]:
        """Return what takes (done, total) of this phase; the same counts again are no news."""
        told: tuple[int, int] | None = None

        def report(done: int, total: int) -> None:
            nonlocal told
            if (done, total) == told:
                return
            told = (done, total)
            self._on_progress(
                Progress(
                    phase=phase, done=done, total=total, unit=unit, seconds=time.monotonic() - self._begin
                )
            )

        return report
