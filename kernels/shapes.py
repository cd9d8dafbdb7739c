"""A decoder layer and a step as the choice of kernels sees them: plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire.kernels.formats.cache_spec import CacheSpec
from quire.kernels.linear.linear import Matrix


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A decoder layer: its products, its attention, and what that keeps.

    up: the product into the MLP; with `gated` a gate and an up projection, with RMSNorms before and after it,
    else a layer of OPT and GPT-2. up and down are None where an MLP computes itself. plain and chunked: its
    attention is, see `attention.batch.AttentionLayer`.
    """

    dtype: torch.dtype
    num_heads: int
    cache: CacheSpec
    qkv: Matrix
    output: Matrix
    up: Matrix | None
    down: Matrix | None
    gated: bool
    plain: bool = True
    chunked: bool = False

    @property
    def of_kv_head(self) -> LayerShape:
        """Return the layer with one of its KV heads, and the query heads that this serves."""
        cache = replace(self.cache, heads=1, index=0)
        return replace(self, num_heads=self.group, cache=cache)

    @property
    def group(self) -> int:
        """Return how many query heads a kv head serves."""
        return self.num_heads // self.cache.heads


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step's sizes, known without looking at a device.

    tokens: T of all. decodes: rows with one token each. chunks: rows with a chunk of a prompt, None in a step
    of decodes only; longest_query: tokens of the longest one, or more. newest: rows whose newest tokens alone
    are wanted of the layer, None: all tokens are. shared: rows share prefixes. longest_context: tokens that a
    block table has room for.
    """

    tokens: int
    decodes: int
    chunks: int | None
    longest_query: int
    newest: int | None
    shared: bool
    block_size: int
    longest_context: int

    @property
    def phase(self) -> str:
        return "decode" if self.chunks is None else "mixed"

    @property
    def wanted(self) -> int:
        """Return how many tokens the layer computes past its attention."""
        return self.tokens if self.newest is None else self.newest
