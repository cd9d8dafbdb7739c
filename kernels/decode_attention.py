"""Paged attention with one query per sequence: split-KV decode."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch of split decode attention, made once and reused by every layer and step.

    partials [max_batch, max_splits, num_q_heads, head_dim] f32, lse [max_batch, max_splits, num_q_heads] f32.
    """

    partials: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def allocate(
        cls, max_batch: int, num_q_heads: int, head_dim: int, device: torch.device | str
    ) -> DecodeWorkspace:
        return cls(
            torch.empty(max_batch, num_q_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(max_batch, num_q_heads, dtype=torch.float32, device=device),
        )


def decode_attention_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """The same as `decode_attention` in plain torch, on any device; it needs no workspace."""
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    longest = int(context_lens.max()) if batch else 0
    if longest == 0:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    num_blocks = -(-longest // block_size)
    starts = torch.arange(num_blocks, device=q.device) * block_size
    tables = block_tables[rows.long(), :num_blocks].long()
    tables = tables.masked_fill(starts >= context_lens[:, None], 0)
    # One index over (block, head) gathers [B, Hkv, blocks, block_size, D] in the order of the matmuls.
    heads = torch.arange(num_kv_heads, device=q.device)[:, None]
    k, v = (kv[tables[:, None], part, heads].flatten(2, 3).float() for part in (0, 1))

    position = torch.arange(num_blocks * block_size, device=q.device)
    seen = position < context_lens[:, None]
    if window:
        seen &= position >= context_lens[:, None] - window
    hidden = ~seen[:, None, :, None]
    # Grouped query heads are the matmul's M side, so K and V are never repeated.
    grouped = q.reshape(batch, num_kv_heads, -1, head_dim).float()
    scores = (grouped @ k.mT) * scale
    weights = scores.masked_fill(hidden.mT, float("-inf")).softmax(-1).masked_fill(hidden.mT, 0.0)
    out = weights @ v.masked_fill_(hidden, 0.0)  # unused slots may hold NaN, and 0 · NaN is NaN
    return out.reshape(batch, num_q_heads, head_dim).to(q.dtype)
