"""The KV cache's memory: one tensor, a block being one contiguous region of it across all layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.models.config import ModelConfig


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
        self._copy_blocks = copy_blocks

    def copy(self, pairs: Tensor) -> None:
        """Copy whole blocks, pairs [C, 2] of (source, destination) on the device, in one launch."""
        self._copy_blocks(self.blocks, pairs)
