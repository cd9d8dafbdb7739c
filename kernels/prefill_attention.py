"""Paged attention with many queries per sequence: prefill, chunked prefill and extend."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def prefill_attention_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    """The same as `prefill_attention` in plain torch, on any device: one SDPA call per sequence."""
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv.shape[2:4]
    heads = torch.arange(num_kv_heads, device=q.device)[:, None]
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts = query_starts.tolist()
    for row, begin, end, context_len in zip(
        rows.tolist(), starts[:-1], starts[1:], context_lens.tolist(), strict=True
    ):
        if begin == end or context_len == 0:
            continue
        table = block_tables[row, : -(-context_len // block_size)].long()
        k, v = (kv[table, part, heads].flatten(1, 2)[:, :context_len].float() for part in (0, 1))
        position = torch.arange(context_len - (end - begin), context_len, device=q.device)[:, None]
        key = torch.arange(context_len, device=q.device)
        seen = key <= position
        if window:
            seen &= key > position - window
        # Grouped query heads become more queries of their kv head, so K and V are never repeated.
        group = num_q_heads // num_kv_heads
        grouped = q[begin:end].float().reshape(end - begin, num_kv_heads, group, head_dim)
        grouped = grouped.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
        attended = F.scaled_dot_product_attention(
            grouped[None], k[None], v[None], attn_mask=seen.repeat(group, 1), scale=scale
        )
        attended = attended.view(num_kv_heads, group, end - begin, head_dim).permute(2, 0, 1, 3)
        out[begin:end] = attended.reshape(end - begin, num_q_heads, head_dim).to(q.dtype)
    return out
