"""A histogram cheap enough to be fed for every token."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
)
STEP_SECONDS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
REGISTRY_SECONDS = (0.0003, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
LATENCY_SECONDS = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
TOKENS = (1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0)


class Exemplar(NamedTuple):
    """One observation of a bucket's, the latest, and the request that it was made of."""

    request_id: str
    value: float
    at: float  # seconds since the epoch


class Histogram:
    __slots__ = ("_bounds", "_clock", "_counts", "_exemplars", "total")

    def __init__(self, bounds: tuple[float, ...], clock: Callable[[], float] = time.time) -> None:
        self._bounds = bounds
        self._clock = clock
        self._exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1, request_id: str | None = None) -> None:
        """Count `value`, with the request that it is of, if it is of one."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += times
        self.total += value * times
        if request_id is not None:
            self._exemplars[bucket] = Exemplar(request_id, value, self._clock())

    def buckets(self) -> list[tuple[str, float]]:
        """Return them cumulatively, as Prometheus counts them: (upper bound, observations up to it)."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))

    def exemplars(self) -> list[Exemplar | None]:
        """Return one for each bucket, if there is one."""
        return self._exemplars
