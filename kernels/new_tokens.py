"""Attention of a step in which every token is a decode's: from the fused projection to what was attended."""

from __future__ import annotations

from torch import Tensor

from kernels.decode_attention import decode_attention
from kernels.decode_reference import DecodeGather, decode_attention_reference
from kernels.decode_splits import DecodeWorkspace, runs_at_once
from kernels.new_heads import NewHeads
from kernels.qkv_cache import qkv_to_cache, qkv_to_cache_reference
from kernels.shared_prefix import SharedPrefixes


def decode_new_tokens(
    qkv: Tensor,
    out: Tensor,
    kv: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    order: Tensor,
    heads: NewHeads,
    scale: float,
    window: int,
    workspace: DecodeWorkspace,
    shared: SharedPrefixes | None,
    kv_scales: Tensor | None,
) -> None:
    """K and V of qkv [B, (Hq + 2 Hkv) D] to the cache, attention to `out` [B, Hq, D]; q may be overwritten.

    `positions` and `slots` are as in `qkv_to_cache`, and are those of the last of `context_lens` tokens; the
    rest is as in `decode_attention`. One kernel does both for few rows, where another one costs as much as
    what it does.
    """
    q = _queries(qkv, out)
    if shared is None and kv_scales is None and runs_at_once(len(rows), kv.shape[2]):
        decode_attention(
            q, out, kv, block_tables, rows, context_lens, order, scale, window, workspace, new=heads
        )
        return
    qkv_to_cache(
        qkv, positions, slots, kv, out.shape[1], heads.rope, heads.q_norm, heads.k_norm, heads.eps, kv_scales
    )
    decode_attention(
        q, out, kv, block_tables, rows, context_lens, order, scale, window, workspace,
        shared=shared, kv_scales=kv_scales,
    )  # fmt: skip


def decode_new_tokens_reference(
    qkv: Tensor,
    out: Tensor,
    kv: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    order: Tensor,
    heads: NewHeads,
    scale: float,
    window: int,
    workspace: DecodeGather | DecodeWorkspace | None = None,
    shared: SharedPrefixes | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """The same as `decode_new_tokens` in plain torch."""
    qkv_to_cache_reference(
        qkv, positions, slots, kv, out.shape[1], heads.rope, heads.q_norm, heads.k_norm, heads.eps, kv_scales
    )
    decode_attention_reference(
        _queries(qkv, out), out, kv, block_tables, rows, context_lens, order, scale, window, workspace,
        kv_scales=kv_scales,
    )  # fmt: skip


def _queries(qkv: Tensor, out: Tensor) -> Tensor:
    heads, head_dim = out.shape[1:]
    return qkv[:, : heads * head_dim].unflatten(1, (heads, head_dim))
