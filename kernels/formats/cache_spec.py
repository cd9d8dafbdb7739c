"""What a layer keeps of the tokens that it has seen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A key and a value of head_dim numbers for each of `heads` heads.

    window: how many newest tokens' are read; 0 is a full cache, of all tokens.
    """

    heads: int
    head_dim: int
    window: int = 0

    @property
    def kind(self) -> str:
        return "window" if self.window else "full"
