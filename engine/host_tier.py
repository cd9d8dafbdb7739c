"""Blocks in host memory: those of swapped groups, and cached ones that device memory had no room for."""

from __future__ import annotations

from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.prefix_cache import Prefix, PrefixCache


@dataclass(frozen=True, slots=True)
class Transfer:
    """One block on its way; both ends are held until it is there."""

    device: int
    host: int


class HostTier:
    """The second tier: the same accounting as the device's, and content found by the same digests."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = PrefixCache(num_blocks)
        self.pool = BlockPool(num_blocks, self.cache.forget)

    def publish(self, prefix: Prefix, block: int) -> None:
        """Active `block` holds the last of `prefix`, now that its transfer is done: keep it findable."""
        if self.cache.publish(prefix, block) == block:
            self.pool.keep(block)
