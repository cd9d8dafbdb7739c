"""Which way a preempted group goes: its blocks to host memory, or its tokens through prefill again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

PreemptionMode = Literal["auto", "swap", "recompute"]


class PreemptionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Costs are measured at start, so that the choice does not depend on the moment (section 4.5, 7.3)."""

    mode: PreemptionMode = "auto"
    seconds_per_block: float = 0.0  # over the link, one way
    seconds_per_token: float = 0.0  # of prefill, whatever comes before it
    seconds_per_pair: float = 0.0  # of a token and one before it, which it attends to

    def swaps(self, blocks: int, contexts: Iterable[int]) -> bool:
        """Whether `blocks` out and in again are cheaper than to prefill so many tokens of each sequence."""
        if self.mode == "auto":
            recompute = sum(self.prefill_seconds(tokens) for tokens in contexts)
            return 2 * blocks * self.seconds_per_block <= recompute
        return self.mode == "swap"

    def prefill_seconds(self, tokens: int) -> float:
        """To compute the first `tokens` of a sequence."""
        return tokens * self.seconds_per_token + tokens * tokens / 2 * self.seconds_per_pair
