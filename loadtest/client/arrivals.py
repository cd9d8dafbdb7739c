"""Draw when requests of an open loop arrive: a schedule made before the run, which it does not depend on."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> NDArray[np.float64]:
    """Return `count` arrivals at `rate` a second, in seconds from the start, ascending; at infinity all at
    once.

    Gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is
    more even. Raise ValueError.
    """
    if not rate > 0:
        raise ValueError(f"the rate must be more than 0 requests a second, got {rate}")
    if not 0 < burstiness < math.inf:
        raise ValueError(f"the burstiness must be more than 0 and finite, got {burstiness}")
    if math.isinf(rate):
        return np.zeros(count)
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    return np.cumsum(gaps)
