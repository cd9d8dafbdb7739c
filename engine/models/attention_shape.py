"""What one layer's attention is, for models whose layers are not all alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """heads: of queries. head_dim: of a query and a key, and of a value, which may be filled with zeros.

    scale: of scores. plain: weights are the softmax of scaled scores, without a cap, sinks or slopes.
    chunked: its window is a chunk, see `kernels.attention.batch.AttentionLayer`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    plain: bool = True
    chunked: bool = False
