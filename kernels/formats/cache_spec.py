"""What a layer keeps of the tokens that it has seen."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A key and a value of head_dim numbers for each of `heads` heads.

    window: how many newest tokens' are read; 0 is a full cache, of all tokens. latent: so many of a key's
    first numbers are its value, which is not kept beside it; 0: values are vectors of their own. index:
    numbers of the key by which an indexer chooses the token, one beside those of heads; 0: there is none.
    """

    heads: int
    head_dim: int
    window: int = 0
    latent: int = 0
    index: int = 0

    @property
    def parts(self) -> tuple[CacheSpec, ...]:
        """Return what lies in a block one after the other: that of heads, and an indexer's key."""
        heads = replace(self, index=0)
        return (heads, CacheSpec(1, self.index, self.window, latent=self.index)) if self.index else (heads,)

    @property
    def vectors(self) -> int:
        """Return how many vectors each head has of a token."""
        return 1 if self.latent else 2

    @property
    def numbers(self) -> int:
        """Return how many numbers a token has."""
        return self.heads * self.vectors * self.head_dim + self.index

    @property
    def kind(self) -> str:
        return "window" if self.window else "full"
