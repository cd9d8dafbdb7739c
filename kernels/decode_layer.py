"""Attention of a step in which every token is a decode's: from the fused projection to what was attended."""

from __future__ import annotations

from functools import partial
from typing import Any

import triton
from torch import Tensor

from quire.kernels.attention.cascade import SharedPrefixes
from quire.kernels.attention.decode import decode_attention, has_room_for_new_heads
from quire.kernels.attention.decode_reference import DecodeGather, decode_attention_reference
from quire.kernels.attention.kv_tile import tile_keys
from quire.kernels.attention.qk_norm_rope import NewHeads
from quire.kernels.attention.splits import DecodeWorkspace, merge_splits, plan_small_splits, runs_at_once
from quire.kernels.attention.write_kv import qkv_to_cache, qkv_to_cache_reference
from quire.kernels.formats.fp8 import DTYPE as FP8
from quire.kernels.gpu import gpu_of
from quire.kernels.linear.fused import add_linear, add_linear_reference
from quire.kernels.linear.split_output import MOST_SPLITS, add_split_output, suits_split_output


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
    if _by_one_kernel(out, kv, rows, shared):
        decode_attention(
            q, out, kv, block_tables, rows, context_lens, order, scale, window, workspace,
            kv_scales=kv_scales, new=heads,
        )  # fmt: skip
        return
    qkv_to_cache(
        qkv, positions, slots, kv, out.shape[1], heads.rope, heads.q_norm, heads.k_norm, heads.eps, kv_scales
    )
    decode_attention(
        q, out, kv, block_tables, rows, context_lens, order, scale, window, workspace,
        shared=shared, kv_scales=kv_scales, known=True,
    )  # fmt: skip


def add_decoded(
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
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
    """residual [B, N] += what `decode_new_tokens` gives times weight [N, Hq D], plus bias [N] or None.

    In place, and `out` is overwritten. For layers whose other products are those of `linear.fused`.
    """
    (num_heads, head_dim), (num_kv_heads, block_size) = out.shape[1:], kv.shape[2:4]
    if not _by_one_kernel(out, kv, rows, shared):
        decode_new_tokens(
            qkv, out, kv, positions, slots, block_tables, rows, context_lens, order, heads, scale, window,
            workspace, shared, kv_scales,
        )  # fmt: skip
        add_linear(residual, out.flatten(1), weight, bias)
        return
    tile = tile_keys(triton.next_power_of_2(head_dim), qkv.element_size())
    splits = plan_small_splits(len(rows), num_kv_heads, triton.cdiv(block_tables.shape[1] * block_size, tile))
    added = splits > 1 and suits_split_output(residual, weight, num_heads)
    merge = partial(add_split_output, residual, weight, bias) if added else merge_splits
    decode_attention(
        _queries(qkv, out), out, kv, block_tables, rows, context_lens, order, scale, window, workspace,
        min(splits, MOST_SPLITS) if added else splits, kv_scales=kv_scales, new=heads, small=splits > 1,
        merge=merge,
    )  # fmt: skip
    if not added:
        add_linear(residual, out.flatten(1), weight, bias)


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


def add_decoded_reference(
    residual: Tensor, weight: Tensor, bias: Tensor | None, qkv: Tensor, out: Tensor, *decoding: Any
) -> None:
    """The same as `add_decoded` in plain torch."""
    decode_new_tokens_reference(qkv, out, *decoding)
    add_linear_reference(residual, out.flatten(1), weight, bias)


def _by_one_kernel(out: Tensor, kv: Tensor, rows: Tensor, shared: SharedPrefixes | None) -> bool:
    (heads, head_dim), kv_heads = out.shape[1:], kv.shape[2]
    return (
        shared is None
        and kv.dtype != FP8
        and runs_at_once(len(rows), kv_heads)
        and has_room_for_new_heads(gpu_of(out.device), heads // kv_heads, head_dim, out.dtype)
    )


def _queries(qkv: Tensor, out: Tensor) -> Tensor:
    heads, head_dim = out.shape[1:]
    return qkv[:, : heads * head_dim].unflatten(1, (heads, head_dim))
