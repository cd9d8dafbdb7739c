"""The knee of a rate sweep: the highest rate at which latency is still within a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

Point = tuple[float, float]
"""(requests a second, mean normalised latency in seconds a token; infinity: the rate was not sustained)"""

UNLOADED_FACTOR = 3.0  # a limit where none is given: so many times the latency at the lowest rate


def rate_at(points: Sequence[Point], limit: float) -> float | None:
    """Return the rate at which latency first crosses `limit`, between two points by a straight line.

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
) -> tuple[list[Point], float | None, float | None]:
    """Measure latency at `rates`, ascending, until one is beyond the limit, then `refine` rates between.

    Returns the points, the limit (UNLOADED_FACTOR times the first latency if None; still None where that rate
    was not sustained) and the knee.
    """
    points: list[Point] = []
    good, bad = 0.0, math.inf
    for rate in sorted(rates):
        points.append((rate, measure(rate)))
        latency = points[-1][1]
        if limit is None and latency < math.inf:
            limit = UNLOADED_FACTOR * latency
        if limit is None or latency > limit:
            bad = rate
            break
        good = rate
    if limit is None:
        return points, None, None
    for _ in range(refine if 0 < good < bad < math.inf else 0):
        middle = (good * bad) ** 0.5
        points.append((middle, measure(middle)))
        good, bad = (middle, bad) if points[-1][1] <= limit else (good, middle)
    return sorted(points), limit, rate_at(points, limit)


def describe_knee(points: Sequence[Point], limit: float | None) -> str:
    """Describe the knee as a reader needs it, with what it rests on."""
    points = sorted(points)
    unsustained = next((rate for rate, latency in points if math.isinf(latency)), None)
    if unsustained is not None and unsustained == points[0][0]:
        return f"none: {unsustained:.3g} requests/s, the lowest rate, were not sustained"
    if not points or limit is None:
        return "none: no rate was measured"
    knee, where = rate_at(points, limit), f"{1e3 * limit:.1f} ms per token"
    if knee is None:
        return f"below the lowest rate, {points[0][0]:.3g} requests/s (mean normalised latency above {where})"
    text, beyond = f"{knee:.3g} requests/s", next((at for at, latency in points if latency > limit), None)
    if beyond is None:
        return f"{text} or more: at every rate the mean normalised latency was within {where}"
    if beyond == unsustained:
        return f"{text}: {beyond:.3g} requests/s were not sustained (mean normalised latency up to {where})"
    return f"{text}, where the mean normalised latency crosses {where}"
