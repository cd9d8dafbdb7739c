"""What one layer's attention is, for models whose layers are not all alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """heads: of queries. head_dim: of a query and a key, and of a value, which may be filled with zeros.

    scale: of scores. plain: weights are the softmax of scaled scores, with neither a cap nor sinks.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    plain: bool = True
