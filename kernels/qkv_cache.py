"""From the fused QKV projection to the cache: per-head QK-norm, rotary embedding, and the KV write.

RoPE (Su et al. 2021) pairs dimension i with i + D/2 and is applied in fp32, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.norm import rms_norm_reference


def qkv_to_cache_reference(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv: Tensor,
    num_q_heads: int,
    rope: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    """Rewrites q inside qkv and writes k and v to kv; the k and v parts of qkv are left as they were.

    qkv [T, (Hq + 2 Hkv) D], rows may be strided; positions [T]; slots [T], -1 writes nothing;
    kv [blocks, 2, Hkv, block_size, D], strided; rope [max_pos, D] fp32, cosines then sines, or None for
    models without; q_norm and k_norm [D] or None.
    """
    _, _, kv_heads, block_size, head_dim = kv.shape
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split([num_q_heads, kv_heads, kv_heads], dim=1)
    table = None if rope is None else rope[positions.long()].unsqueeze(1)
    if q_norm is not None or table is not None:
        q.copy_(_norm_and_rotate(q, q_norm, table, eps))
    k = _norm_and_rotate(k, k_norm, table, eps)

    written = (slots >= 0).nonzero().squeeze(1)
    block, offset = slots[written] // block_size, slots[written] % block_size
    kv[:, 0][block, :, offset] = k[written]
    kv[:, 1][block, :, offset] = v[written]


def _norm_and_rotate(heads: Tensor, norm: Tensor | None, table: Tensor | None, eps: float) -> Tensor:
    if norm is not None:
        heads = rms_norm_reference(heads, norm, eps)
    if table is None:
        return heads
    cos, sin = table.chunk(2, dim=-1)
    first, second = heads.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(heads.dtype)
