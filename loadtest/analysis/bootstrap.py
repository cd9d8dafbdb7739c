"""Two runs compared: ratios and differences of their figures with bootstrap confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.loadtest.client.records import Record

Values = NDArray[np.float64]
Statistic = Callable[[Values], Values]
"""Takes samples [R, N], gives one figure for each of the R."""

RESAMPLES = 2000
CONFIDENCE = 0.95
SLICE = 200_000  # values resampled at once, so that memory stays small


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of the second run over that of the first; `low`..`high` holds it with 95 % confidence."""

    name: str
    first: float
    second: float
    ratio: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        return not self.low <= 1 <= self.high


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of the second run less that of the first; `low`..`high` holds it with 95 % confidence."""

    difference: float
    low: float
    high: float


def compare(first: Sequence[Record], second: Sequence[Record], seed: int = 0) -> list[Ratio]:
    """Compare two runs' requests that succeeded; each run's requests are resampled as wholes, by itself."""
    return [
        bootstrap_ratio(name, values_of(first), values_of(second), statistic, seed)
        for name, values_of, statistic in FIGURES
        if len(values_of(first)) and len(values_of(second))
    ]


def bootstrap_ratio(name: str, first: Values, second: Values, statistic: Statistic, seed: int) -> Ratio:
    rng = np.random.default_rng(seed)
    one, two = (float(statistic(values[None, :])[0]) for values in (first, second))
    ratios = _resample(rng, second, statistic) / _resample(rng, first, statistic)
    return Ratio(name, one, two, two / one, *_interval(ratios))


def bootstrap_difference(
    first: Sequence[Values], second: Sequence[Values], statistic: Statistic, seed: int
) -> Difference:
    """Compare runs in several turns, resampled as wholes: what disturbs a turn disturbs much of it."""
    rng = np.random.default_rng(seed)
    one, two = (float(statistic(np.concatenate(turns)[None, :])[0]) for turns in (first, second))
    differences = _resample_turns(rng, second, statistic) - _resample_turns(rng, first, statistic)
    return Difference(two - one, *_interval(differences))


def percentile(percent: float) -> Statistic:
    def statistic(samples: Values) -> Values:
        return np.asarray(np.percentile(samples, percent, axis=1))

    return statistic


def _interval(resampled: Values) -> tuple[float, float]:
    low, high = np.percentile(resampled, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return float(low), float(high)


def _resample(rng: np.random.Generator, values: Values, statistic: Statistic) -> Values:
    """Return the statistic of RESAMPLES samples drawn from `values` with replacement."""
    rows = max(1, SLICE // len(values))
    parts = []
    for done in range(0, RESAMPLES, rows):
        shape = (min(rows, RESAMPLES - done), len(values))
        parts.append(statistic(values[rng.integers(0, len(values), shape)]))
    return np.concatenate(parts)


def _mean(samples: Values) -> Values:
    return np.asarray(samples.mean(axis=1))


def _of(field: str) -> Callable[[Sequence[Record]], Values]:
    def values(records: Sequence[Record]) -> Values:
        found = (getattr(record, field) for record in records if not record.failure)
        return np.array([value for value in found if value is not None], np.float64)

    return values


def _resample_turns(rng: np.random.Generator, turns: Sequence[Values], statistic: Statistic) -> Values:
    picks = rng.integers(0, len(turns), (RESAMPLES, len(turns)))
    return np.concatenate([statistic(np.concatenate([turns[at] for at in pick])[None, :]) for pick in picks])


FIGURES: tuple[tuple[str, Callable[[Sequence[Record]], Values], Statistic], ...] = (
    ("TTFT mean", _of("ttft"), _mean),
    ("TTFT p50", _of("ttft"), percentile(50)),
    ("TTFT p99", _of("ttft"), percentile(99)),
    ("TPOT mean", _of("tpot"), _mean),
    ("TPOT p99", _of("tpot"), percentile(99)),
    ("latency p50", _of("latency"), percentile(50)),
    ("normalised latency", _of("normalized_latency"), _mean),
)
