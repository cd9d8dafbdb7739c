"""Attention of a step in which every token is a decode's: from the fused projection to what was attended."""

from __future__ import annotations

import triton
from torch import Tensor

from quire.kernels.attention.batch import AttentionLayer, ForwardBatch
from quire.kernels.attention.decode import DecodeMode, decode, decode_splits, has_room_for_new_heads
from quire.kernels.attention.decode_reference import decode_reference
from quire.kernels.attention.kv_tile import tile_keys
from quire.kernels.attention.splits import merge_splits, plan_small_splits, runs_at_once
from quire.kernels.attention.write_kv import write_kv, write_kv_reference
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import gpu_of
from quire.kernels.linear.fused import add_linear, add_linear_reference
from quire.kernels.linear.linear import Linear
from quire.kernels.linear.split_output import MOST_SPLITS, add_split_output, suits_split_output


def decode_new_tokens(
    qkv: Tensor, out: Tensor, batch: ForwardBatch, layer: AttentionLayer, cache: LayerCache
) -> None:
    """Write K and V of qkv [B, (Hq + 2 Hkv) D] to the cache, and attend to `out` [B, Hq, D].

    q may be overwritten. One kernel does both for few rows, where another one costs as much as what it does.
    """
    q = layer.queries(qkv)
    if _by_one_kernel(out, batch, cache):
        decode(q, out, batch.decode, layer, cache, DecodeMode.NEW)
        return
    write_kv(qkv, batch.positions, batch.slots, layer, cache)
    decode(q, out, batch.decode, layer, cache, DecodeMode.KNOWN)


def decode_beside(
    q: Tensor, out: Tensor, batch: ForwardBatch, layer: AttentionLayer, cache: LayerCache
) -> None:
    """Attend from the decodes of a mixed step whose prefill attention was just launched, if it has any."""
    chunks = 0 if batch.prefill is None else len(batch.prefill.rows)
    decode(q, out, batch.decode, layer, cache, DecodeMode.BESIDE if chunks else DecodeMode.AFTER)


def add_decoded(
    residual: Tensor,
    output: Linear,
    qkv: Tensor,
    out: Tensor,
    batch: ForwardBatch,
    layer: AttentionLayer,
    cache: LayerCache,
) -> None:
    """Add `output` of what `decode_new_tokens` gives to residual [B, N], in place; `out` is overwritten.

    For layers whose other products are those of `linear.fused`.
    """
    if not _by_one_kernel(out, batch, cache):
        decode_new_tokens(qkv, out, batch, layer, cache)
        add_linear(residual, out.flatten(1), output.weight, output.bias)
        return
    tile = tile_keys(triton.next_power_of_2(layer.head_dim), qkv.element_size())
    max_tiles = triton.cdiv(batch.decode.block_tables.shape[1] * cache.block_size, tile)
    splits = plan_small_splits(len(residual), layer.num_kv_heads, max_tiles)
    added = splits > 1 and suits_split_output(residual, output.weight, layer.num_heads)
    partials = decode_splits(
        layer.queries(qkv), out, batch.decode, layer, cache, DecodeMode.NEW,
        min(splits, MOST_SPLITS) if added else splits, small=splits > 1,
    )  # fmt: skip
    if added and partials is not None:
        add_split_output(residual, output.weight, output.bias, partials)
        return
    if partials is not None:
        merge_splits(partials)
    add_linear(residual, out.flatten(1), output.weight, output.bias)


def decode_new_tokens_reference(
    qkv: Tensor, out: Tensor, batch: ForwardBatch, layer: AttentionLayer, cache: LayerCache
) -> None:
    """Do the same as `decode_new_tokens` in plain torch."""
    write_kv_reference(qkv, batch.positions, batch.slots, layer, cache)
    decode_reference(layer.queries(qkv), out, batch.decode, layer, cache)


def decode_beside_reference(
    q: Tensor, out: Tensor, batch: ForwardBatch, layer: AttentionLayer, cache: LayerCache
) -> None:
    """Do the same as `decode_beside` in plain torch."""
    decode_reference(q, out, batch.decode, layer, cache)


def add_decoded_reference(
    residual: Tensor,
    output: Linear,
    qkv: Tensor,
    out: Tensor,
    batch: ForwardBatch,
    layer: AttentionLayer,
    cache: LayerCache,
) -> None:
    """Do the same as `add_decoded` in plain torch."""
    decode_new_tokens_reference(qkv, out, batch, layer, cache)
    add_linear_reference(residual, out.flatten(1), output.weight, output.bias)


def _by_one_kernel(out: Tensor, batch: ForwardBatch, cache: LayerCache) -> bool:
    (heads, head_dim), kv_heads = out.shape[1:], cache.kv_heads
    return (
        batch.decode.shared is None
        and cache.format.written_by_decode
        and runs_at_once(len(batch.decode.rows), kv_heads)
        and has_room_for_new_heads(gpu_of(out.device), heads // kv_heads, head_dim, out.dtype)
    )
