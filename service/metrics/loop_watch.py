"""The health of an event loop: how late it wakes those who sleep, and how many tasks it has."""

from __future__ import annotations

import asyncio
import time

from quire.service.metrics.histogram import Histogram

BEAT_SECONDS = 0.02
LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class LoopWatch:
    """Beats by the loop's own calls: a task would be counted among its tasks, and cost more."""

    def __init__(self) -> None:
        self.lag = Histogram(LAG_SECONDS)
        self._due = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Watch the running loop until it ends."""
        self._loop = asyncio.get_running_loop()
        self._sleep(time.monotonic())

    @property
    def num_tasks(self) -> int:
        """Return how many tasks of the loop have not ended."""
        return 0 if self._loop is None else len(asyncio.all_tasks(self._loop))

    def _beat(self) -> None:
        now = time.monotonic()
        self.lag.observe(max(now - self._due, 0.0))
        self._sleep(now)

    def _sleep(self, now: float) -> None:
        assert self._loop is not None
        self._due = now + BEAT_SECONDS
        self._loop.call_later(BEAT_SECONDS, self._beat)
