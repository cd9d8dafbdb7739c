"""The knee of a rate sweep: the highest rate at which latency is still within a limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

Point = tuple[float, float]
"""(requests a second, mean normalised latency in seconds a token)"""

UNLOADED_FACTOR = 3.0  # a limit where none is given: so many times the latency at the lowest rate


def rate_at(points: Sequence[Point], limit: float) -> float | None:
    """The rate at which latency first crosses `limit`, between two points by a straight line.

    The highest rate where it never does, and None where it is beyond the limit from the first.
    """
    points = sorted(points)
    if not points or points[0][1] > limit:
        return None
    for (rate, latency), (next_rate, next_latency) in pairwise(points):
        if next_latency > limit:
            return rate + (next_rate - rate) * (limit - latency) / (next_latency - latency)
    return points[-1][0]


def find_knee(
    measure: Callable[[float], float], rates: Sequence[float], limit: float | None, refine: int
) -> tuple[list[Point], float, float | None]:
    """Measure latency at `rates`, ascending, until one is beyond the limit, then `refine` rates between.

    Returns the points, the limit (UNLOADED_FACTOR times the first latency if None) and the knee.
    """
    points: list[Point] = []
    good, bad = 0.0, float("inf")
    for rate in sorted(rates):
        points.append((rate, measure(rate)))
        if limit is None:
            limit = UNLOADED_FACTOR * points[0][1]
        if points[-1][1] > limit:
            bad = rate
            break
        good = rate
    assert limit is not None, "a sweep needs at least one rate"
    for _ in range(refine if 0 < good < bad < float("inf") else 0):
        middle = (good * bad) ** 0.5
        points.append((middle, measure(middle)))
        good, bad = (middle, bad) if points[-1][1] <= limit else (good, middle)
    return sorted(points), limit, rate_at(points, limit)
