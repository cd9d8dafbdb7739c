"""Paged attention with one query per sequence in plain torch: the CPU's, and what the kernel is held to."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention.batch import AttentionLayer, DecodeBatch
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.formats.layer_cache import LayerCache


def decode_reference(
    q: Tensor, out: Tensor, batch: DecodeBatch, layer: AttentionLayer, cache: LayerCache
) -> None:
    """Do the same as `attention.decode.decode` in plain torch, whatever the order.

    A DecodeGather as the workspace saves the layers of a step some work.
    """
    gather = batch.workspace if isinstance(batch.workspace, DecodeGather) else DecodeGather()
    num_kv_heads, (num_q_heads, head_dim) = cache.kv_heads, q.shape[1:]
    group = num_q_heads // num_kv_heads
    shape = torch.Size((*cache.kv.shape[:4], head_dim))
    for part in gather.parts(batch.block_tables, batch.rows, batch.context_lens, shape, layer.window):
        k, v = cache.read(part.index).flatten(3, 4).narrow(3, 0, part.longest).unbind(1)
        # Grouped query heads are the matmul's M side, so K and V are never repeated.
        grouped = q[part.members].reshape(-1, num_kv_heads, group, head_dim).float() * layer.scale
        scores = grouped @ k.mT
        if part.hidden is None:
            attended = scores.softmax(-1) @ v
        else:
            weights = scores.masked_fill_(part.hidden, float("-inf")).softmax(-1)
            # Unused slots may hold NaN, and 0 · NaN is NaN.
            attended = weights @ v.masked_fill(part.hidden.mT, 0.0)
        out[part.members] = attended.view(-1, num_q_heads, head_dim).to(out.dtype)
