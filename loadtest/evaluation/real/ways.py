"""What a way to generate with a whole model came to."""

from __future__ import annotations

import msgspec

CONTIGUOUS = "contiguous, one after the other"


class WayOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """`peak_mib`: beyond the weights, 0 on a CPU. `equal`: answers that are the contiguous ones."""

    way: str
    tokens_per_second: float
    peak_mib: float
    equal: int
    requests: int
