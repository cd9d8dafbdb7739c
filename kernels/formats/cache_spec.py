"""What a layer keeps of the tokens that it has seen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A key and a value of head_dim numbers for each of `heads` heads.

    window: how many newest tokens' are read; 0 is a full cache, of all tokens. latent: so many of a key's
    first numbers are its value, which is not kept beside it; 0: values are vectors of their own.
    """

    heads: int
    head_dim: int
    window: int = 0
    latent: int = 0

    @property
    def vectors(self) -> int:
        """Vectors that each head has of a token."""
        return 1 if self.latent else 2

    @property
    def numbers(self) -> int:
        """Numbers of a token."""
        return self.heads * self.vectors * self.head_dim

    @property
    def kind(self) -> str:
        return "window" if self.window else "full"
