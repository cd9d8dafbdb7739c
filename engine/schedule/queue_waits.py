"""What the head of the queue waits for, and for how long the queue has stood still for each reason.

All that wait, wait for their head. So each request's share is what these clocks show when it leaves the
queue, less what they showed when it came, and nobody looks at those behind the head.
"""

from __future__ import annotations

from typing import get_args

from quire.engine.records import Wait, Waited, WaitReason

REASONS: tuple[WaitReason, ...] = get_args(WaitReason)


class QueueWaits:
    """A clock for each reason, one of which runs while the head waits."""

    def __init__(self) -> None:
        self.reason: WaitReason | None = None  # whose clock runs
        self._since = 0.0
        self._seconds = dict.fromkeys(REASONS, 0.0)
        self._latest: dict[WaitReason, Wait] = {}

    def begin(self, wait: Wait, now: float) -> None:
        """Have the clock of its reason run."""
        self.end(now)
        self.reason, self._since = wait.reason, now
        self._latest[wait.reason] = wait

    def end(self, now: float) -> None:
        """Stop the clock that runs, if one does."""
        if self.reason is not None:
            self._seconds[self.reason] += max(0.0, now - self._since)
            self.reason = None

    def read(self, now: float) -> tuple[float, ...]:
        """Return the seconds that each clock shows, in the order of REASONS."""
        return tuple(
            seconds + (max(0.0, now - self._since) if reason == self.reason else 0.0)
            for reason, seconds in self._seconds.items()
        )

    def since(self, before: tuple[float, ...], now: float) -> list[Waited]:
        """Return how long the queue stood still after the clocks showed `before`, by reason."""
        shown = zip(REASONS, before, self.read(now), strict=True)
        return [Waited(end - begin, self._latest[reason]) for reason, begin, end in shown if end > begin]
