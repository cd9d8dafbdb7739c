"""What one layer's attention is, for models whose layers are not all alike."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """heads: of queries. head_dim: of a query and a key, and of a value, which may be filled with zeros.

    scale: of scores. plain: weights are the softmax of scaled scores, without a cap, sinks or slopes.
    chunked: its window is a chunk, see `kernels.attention.batch.AttentionLayer`.
    copies: ranks that hold the same KV heads. latent: so many of a key's first numbers are its value, 0 where
    values are vectors of their own; projected: of a query head as the model projects it, which head_dim is
    where this is 0. index: as `kernels.formats.cache_spec.CacheSpec` has it. biased: among a key's numbers is
    what is added to its scores, which must not be rounded.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    plain: bool = True
    chunked: bool = False
    copies: int = 1
    latent: int = 0
    projected: int = 0
    index: int = 0
    biased: bool = False

    def divides(self, ranks: int) -> bool:
        """Return whether so many ranks can have equal shares of the heads; KV heads are repeated if fewer."""
        return self.heads % ranks == 0 and (self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0)

    def of_rank(self, ranks: int) -> AttentionShape:
        """Return what one of so many ranks computes of it."""
        kv_heads, copies = max(self.kv_heads // ranks, 1), max(ranks // self.kv_heads, 1)
        return replace(self, heads=self.heads // ranks, kv_heads=kv_heads, copies=copies)
