"""Paged attention with one query per sequence in plain torch: the CPU's, and what the kernel is held to."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention.batch import AttentionLayer, DecodeBatch
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.attention.softmax import weights_reference
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
    sinks = None if layer.sinks is None else layer.sinks.view(num_kv_heads, group, 1)
    shape = torch.Size((*cache.kv.shape[:4], head_dim))
    parts = gather.parts(
        batch.block_tables, batch.rows, batch.context_lens, shape, layer.window, chunked=layer.chunked
    )
    for part in parts:
        vectors = cache.read(part.index).flatten(3, 4).narrow(3, 0, part.longest)
        k, v = vectors[:, 0], vectors[:, 0, ..., : cache.latent] if cache.latent else vectors[:, 1]
        # Grouped query heads are the matmul's M side, so K and V are never repeated.
        grouped = q[part.members].reshape(-1, num_kv_heads, group, head_dim).float() * layer.scale
        scores = grouped @ k.mT
        if layer.slopes is not None:
            newest = batch.context_lens[part.members].view(-1, 1, 1, 1) - 1
            age = newest - torch.arange(part.longest, device=q.device)
            scores -= layer.slopes.view(num_kv_heads, group, 1) * age
        weights = weights_reference(scores, part.hidden, layer.softcap, sinks)
        if part.hidden is not None:  # unused slots may hold NaN, and 0 · NaN is NaN
            v = v.masked_fill(part.hidden.mT, 0.0)
        attended = weights @ v
        out[part.members] = attended.view(-1, num_q_heads, v.shape[-1]).to(out.dtype)
