"""A replica's failures, counted as load: else who fails fastest looks idle and gets all requests."""

from __future__ import annotations

from typing import Literal

HALF_LIFE_SECONDS = 5.0
FIRST = 8.0  # sequences: outweighs no prefix that is cached there, but two failures in a row do
MOST = 1024.0

# How a request fared. Refused: by its own fault or for now, which tells nothing of how others fare.
Outcome = Literal["answered", "refused", "failed"]


class Failures:
    """Each in a row adds to twice what is left of those before; a request that succeeds ends the row."""

    def __init__(self) -> None:
        self._load = 0.0  # at that time
        self._then = float("-inf")

    def load(self, now: float) -> int:
        """Return how many more sequences it is taken to have."""
        return round(self._left(now)) if self._load else 0

    def add(self, sent_at: float, now: float) -> None:
        """Note that a request failed. Those that were under way at the last failure failed with that one."""
        if sent_at >= self._then:
            self._load = min(MOST, 2 * self._left(now) + FIRST)
            self._then = now

    def clear(self) -> None:
        self._load = 0.0

    def _left(self, now: float) -> float:
        return self._load * 0.5 ** ((now - self._then) / HALF_LIFE_SECONDS)
