"""Attention to latents with many queries per sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention.batch import AttentionLayer, PrefillBatch
from quire.kernels.attention.kv_tile import LOG2_E, LOWEST, load_blocks
from quire.kernels.attention.latent.tile import (
    attend_to_tile,
    check_latent_inputs,
    latent_tiles,
    load_queries,
)
from quire.kernels.attention.prefill import find_sequence
from quire.kernels.attention.softmax import load_of_heads
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import gpu_of

MOST_SPLITS = 32  # a power of two


def prefill_latents(
    q: Tensor,
    out: Tensor,
    batch: PrefillBatch,
    layer: AttentionLayer,
    cache: LayerCache,
    lse: Tensor | None = None,
) -> None:
    """Attend causally from the newest tokens of several rows to their contexts, to `out` [T, Hq, Dv].

    q [T, Hq, D]; as `attention.prefill.prefill` does. Each latent is read once for all heads of some tokens,
    of which a product has as many numbers as a latent: dearer than with keys of each head, which in return
    take no product to expand. With lse [T, Hq] fp32, and no window, only what a row's context has before its
    newest tokens is attended to: lse gets the log-sum-exps (base 2) of scores, and is left alone, as `out`,
    of rows that have nothing there. Few tokens have programs for parts of it, for an idle device.
    """
    check_latent_inputs(q, out, layer, cache)
    tokens, heads, width = q.shape
    count = len(batch.rows)
    if tokens == 0 or count == 0:
        return
    longest = min(batch.max_query_len, tokens)
    gpu = gpu_of(q.device)
    tiles = latent_tiles(gpu, heads, longest, width, cache.latent, q.dtype)
    queries, parts = tiles.lanes // tiles.group, tiles.head_blocks(heads)
    splits = 1
    if lse is not None:
        splits = max(min(gpu.multiprocessors // (triton.cdiv(tokens, queries) * parts), MOST_SPLITS), 1)
    into, lses = out, lse
    if splits > 1:
        into = torch.empty(splits, *out.shape, dtype=torch.float32, device=q.device)
        lses = torch.full((splits, tokens, heads), float("-inf"), device=q.device)
    _prefill_kernel[tokens // queries + count, parts, splits](
        into, lses, q, cache.kv, batch.block_tables, batch.rows, batch.query_starts, batch.context_lens,
        count, layer.scale * LOG2_E, layer.window, layer.softcap * LOG2_E or None, layer.sinks, layer.slopes,
        q.stride(0), batch.block_tables.stride(0), cache.kv.stride(0), cache.kv.stride(3), tokens,
        HEADS=heads, GROUP=tiles.group, LANES=tiles.lanes, BLOCK_SIZE=cache.block_size, LATENT=cache.latent,
        WIDTH=width, DIM=tiles.dim, REST_DIM=tiles.rest_dim, TILE=tiles.keys, CHUNKED=layer.chunked,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[tokens, heads](
            out, lse, into, lses, splits, LATENT=cache.latent, DIM=tiles.dim, SPLITS=MOST_SPLITS, num_warps=4
        )


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    out: tl.tensor,
    lse: tl.tensor,
    partials: tl.tensor,
    lses: tl.tensor,
    splits: tl.tensor,
    LATENT: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Merge what the splits gave for a token and a head, if any gave something."""
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    stride = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    split = tl.arange(0, SPLITS)
    each = tl.load(lses + split * stride + place, mask=split < splits, other=float("-inf"))
    peak = tl.max(each, 0)
    if peak == float("-inf"):
        return
    total = tl.sum(tl.exp2(each - peak), 0)
    dim = tl.arange(0, DIM)
    acc = tl.zeros([DIM], tl.float32)
    for at in range(0, splits):
        weight = tl.exp2(tl.load(lses + at * stride + place) - peak)
        values = partials + (at * stride + place) * LATENT + dim
        there = tl.where(weight > 0.0, LATENT, 0)  # nothing was written for a split without keys
        acc += weight * tl.load(values, mask=dim < there, other=0.0)
    tl.store(out + place * LATENT + dim, (acc / total).to(out.dtype.element_ty), mask=dim < LATENT)
    tl.store(lse + place, peak + tl.log2(total))


@triton.jit(do_not_specialize=["num_sequences", "window", "tokens"])
def _prefill_kernel(
    out: tl.tensor,
    lse: tl.tensor,
    q: tl.tensor,
    kv: tl.tensor,
    block_tables: tl.tensor,
    rows: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    num_sequences: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    softcap_log2: tl.tensor,
    sinks: tl.tensor,
    slopes: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    tokens: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    TILE: tl.constexpr,
    CHUNKED: tl.constexpr,
) -> None:
    """Attend from LANES // GROUP consecutive queries of a sequence, for GROUP of their heads.

    With lse to a split of what is before them, of as many as there are programs; out and lse have room for
    each split's results, of all `tokens`.
    """
    QUERIES: tl.constexpr = LANES // GROUP
    # A sequence's later tiles see more keys: start the heavy ones first.
    sequence, query_tile = find_sequence(
        query_starts, num_sequences, tl.num_programs(0) - 1 - tl.program_id(0), QUERIES
    )
    query_start = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - query_start
    first_query = query_tile * QUERIES
    if first_query >= query_len:
        return
    context_len = tl.load(context_lens + sequence)
    first_position = context_len - query_len + first_query
    end = tl.minimum(first_position + QUERIES, context_len)  # one past the last position
    if lse is not None:
        end = context_len - query_len
        all_tiles = tl.cdiv(tl.maximum(end, 0), TILE)
        split_tiles = tl.cdiv(all_tiles, tl.num_programs(2))
        split_tile = tl.program_id(2) * split_tiles
        if split_tile >= all_tiles:
            return

    lane = tl.arange(0, LANES)
    query = first_query + lane // GROUP
    head = tl.program_id(1) * GROUP + lane % GROUP
    is_query = (lane < QUERIES * GROUP) & (query < query_len) & (head < HEADS)
    token = (query_start + query).to(tl.int64)
    q_tile, q_rest = load_queries(q, token * q_stride + head * WIDTH, is_query, LATENT, WIDTH, DIM, REST_DIM)
    slope = slopes
    if slopes is not None:
        slope = load_of_heads(slopes, head, is_query)
    table = block_tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    acc = tl.zeros([LANES, DIM], tl.float32)
    peak = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    if sinks is not None:  # as a key without a value
        peak = load_of_heads(sinks, head, is_query)
        total += 1.0
    # Without a window all queries see all keys up to the first position's: whole tiles that need no mask.
    first_tile = 0
    masked_tile = tl.maximum(first_position + 1, 0) // TILE
    if CHUNKED:
        first_tile = tl.maximum(first_position, 0) // window * window // TILE
        masked_tile = first_tile
    elif window > 0:
        first_tile = tl.maximum(first_position + 1 - window, 0) // TILE
        masked_tile = first_tile
    position = first_position + lane // GROUP
    last_tile = tl.cdiv(end, TILE)
    if lse is not None:  # all see as much as one that was ahead of them would
        first_tile = split_tile
        last_tile = tl.minimum(split_tile + split_tiles, all_tiles)
        masked_tile = tl.minimum(end // TILE, last_tile)
        position = tl.minimum(position, end - 1)
    blocks = load_blocks(table, first_tile * TILE, context_len, BLOCK_SIZE, TILE)
    for tile in range(first_tile, masked_tile):
        following = load_blocks(table, (tile + 1) * TILE, context_len, BLOCK_SIZE, TILE)
        acc, peak, total = attend_to_tile(
            q_tile, q_rest, kv, blocks, tile * TILE, context_len, block_stride, slot_stride, True, acc, peak,
            total, scale_log2, softcap_log2, slope, position[:, None], BLOCK_SIZE, LATENT, WIDTH, TILE, False,
        )  # fmt: skip
        blocks = following
    for tile in range(masked_tile, last_tile):
        following = load_blocks(table, (tile + 1) * TILE, context_len, BLOCK_SIZE, TILE)
        age = position[:, None] - (tile * TILE + tl.arange(0, TILE))[None, :]
        if CHUNKED:
            seen = (age >= 0) & (age <= (position % window)[:, None])
        else:
            seen = (age >= 0) & ((age < window) | (window == 0))
        acc, peak, total = attend_to_tile(
            q_tile, q_rest, kv, blocks, tile * TILE, context_len, block_stride, slot_stride, seen, acc, peak,
            total, scale_log2, softcap_log2, slope, position[:, None], BLOCK_SIZE, LATENT, WIDTH, TILE, True,
        )  # fmt: skip
        blocks = following

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    dim = tl.arange(0, DIM)
    if lse is not None:
        token += tl.program_id(2).to(tl.int64) * tokens
    place = (token * HEADS + head)[:, None] * LATENT + dim[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_query[:, None] & (dim < LATENT)[None, :])
    if lse is not None:
        tl.store(lse + token * HEADS + head, peak + tl.log2(total), mask=is_query)
