"""The KV cache's memory: one tensor, a block being one contiguous region of it across all layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.plan import Int32


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values that `block_size` tokens take over all layers."""
    return config.num_layers * 2 * config.num_kv_heads * block_size * config.head_dim * dtype.itemsize


class KVCache:
    """`blocks` is [num_blocks, layers, 2, kv_heads, block_size, head_dim]; 2 is keys, values."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        copy_blocks: Callable[[Tensor, Tensor], None],
    ) -> None:
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        # Never cleared: a slot is read only after it was written, and untouched pages cost a CPU nothing.
        self.blocks = torch.empty(shape, dtype=dtype, device=device)
        self.block_size = block_size
        self.host: Tensor | None = None  # the same blocks in pinned host memory
        self._copy_blocks = copy_blocks

    def add_host_tier(self, num_blocks: int) -> None:
        """Take host memory for `num_blocks` blocks, pinned where the device is a GPU."""
        pinned = self.blocks.is_cuda
        self.host = torch.empty(
            (num_blocks, *self.blocks.shape[1:]), dtype=self.blocks.dtype, pin_memory=pinned
        )

    def swap(self, out: Int32, back: Int32) -> None:
        """Copy (device, host) blocks out and (host, device) blocks back, one copy each, in stream order."""
        assert self.host is not None
        for device, host in out.tolist():
            self.host[host].copy_(self.blocks[device], non_blocking=True)
        for host, device in back.tolist():
            self.blocks[device].copy_(self.host[host], non_blocking=True)

    def copy(self, pairs: Tensor) -> None:
        """Copy whole blocks, pairs [C, 2] of (source, destination) on the device, in one launch."""
        self._copy_blocks(self.blocks, pairs)
