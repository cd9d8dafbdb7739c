"""Which way a preempted group goes: its blocks to host memory, or its tokens through prefill again."""

from __future__ import annotations

from typing import Literal

import msgspec

PreemptionMode = Literal["auto", "swap", "recompute"]


class PreemptionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Costs are measured at start, so that the choice does not depend on the moment (section 4.5, 7.3)."""

    mode: PreemptionMode = "auto"
    seconds_per_block: float = 0.0  # over the link, one way
    seconds_per_token: float = 0.0  # of prefill

    def swaps(self, blocks: int, tokens: int) -> bool:
        """Whether `blocks` out and in again are cheaper than to prefill `tokens`."""
        if self.mode == "auto":
            return 2 * blocks * self.seconds_per_block <= tokens * self.seconds_per_token
        return self.mode == "swap"
