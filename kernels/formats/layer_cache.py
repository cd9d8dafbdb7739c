"""One layer of the KV cache as the kernels take it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LayerCache(NamedTuple):
    """Strided views of one layer of the cache.

    kv [num_blocks, 2, kv_heads, block_size, head_dim], in fp12 [..., 3, head_dim/2] (see
    `quire.kernels.formats.fp12`); 2 is keys, values. scales [num_blocks, kv_heads, block_size, 2] fp16 if kv
    is rounded (see `quire.kernels.formats.kv_format`), else None. expanded [num_blocks, 2, kv_heads,
    block_size, head_dim] or None: room for one layer's keys and values as numbers, the same for all layers.
    """

    kv: Tensor
    scales: Tensor | None
    expanded: Tensor | None
