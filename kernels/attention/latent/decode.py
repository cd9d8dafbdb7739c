"""Attention to latents with one query per sequence, which all its heads have in common: split decode."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention.batch import AttentionLayer, DecodeBatch
from quire.kernels.attention.kv_tile import LOG2_E, LOWEST, load_blocks
from quire.kernels.attention.latent.tile import (
    MOST_LANES,
    attend_to_tile,
    check_latent_inputs,
    latent_tiles,
    load_queries,
)
from quire.kernels.attention.softmax import load_of_heads
from quire.kernels.attention.splits import (
    MAX_SPLITS,
    DecodeWorkspace,
    SplitPartials,
    merge_splits,
    most_tiles,
    plan_splits,
    tiles_and_splits,
)
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import gpu_of


def decode_latents(
    q: Tensor,
    out: Tensor,
    batch: DecodeBatch,
    layer: AttentionLayer,
    cache: LayerCache,
    splits: int | None = None,
) -> None:
    """Attend from each row's newest token to its context, to the first B tokens of `out` [T, Hq, Dv].

    q [T, Hq, D]: its first B tokens are the rows' queries. A row without context writes nothing. What rows
    share each reads for itself. Grid and launches depend on shapes only. `splits` overrides `plan_splits`.
    """
    check_latent_inputs(q, out, layer, cache)
    workspace, count = batch.workspace, len(batch.rows)
    assert isinstance(workspace, DecodeWorkspace)
    if count == 0:
        return
    heads, width = q.shape[1:]
    gpu, parts = gpu_of(q.device), triton.cdiv(heads, MOST_LANES)
    few = count * parts * MAX_SPLITS <= gpu.multiprocessors
    tiles = latent_tiles(gpu, heads, 1, width, cache.latent, q.dtype, few=few)
    parts = tiles.head_blocks(heads)
    max_tiles = most_tiles(batch.block_tables.shape[1] * cache.block_size, layer.window, tiles.keys)
    room = min(workspace.lse.numel() // heads, workspace.partials.numel() // (heads * cache.latent)) // count
    splits = max(min(splits or plan_splits(count, parts, max_tiles), room), 1)
    _decode_kernel[parts, count, splits](
        out, workspace.partials, workspace.lse, q, cache.kv, batch.block_tables, batch.rows,
        batch.context_lens, batch.order, layer.scale * LOG2_E, layer.window, layer.softcap * LOG2_E or None,
        layer.sinks, layer.slopes, q.stride(0), batch.block_tables.stride(0), cache.kv.stride(0),
        cache.kv.stride(3),
        HEADS=heads, GROUP=tiles.group, LANES=tiles.lanes, BLOCK_SIZE=cache.block_size, LATENT=cache.latent,
        WIDTH=width, DIM=tiles.dim, REST_DIM=tiles.rest_dim, TILE=tiles.keys, CHUNKED=layer.chunked,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if splits > 1:
        partials = SplitPartials(
            out, batch.context_lens, layer.window, splits, tiles.keys, workspace, layer.chunked
        )
        merge_splits(partials)


@triton.jit(do_not_specialize=["window"])
def _decode_kernel(
    out: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    q: tl.tensor,
    kv: tl.tensor,
    block_tables: tl.tensor,
    rows: tl.tensor,
    context_lens: tl.tensor,
    order: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    softcap_log2: tl.tensor,
    sinks: tl.tensor,
    slopes: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
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
    """One split of one row's context for GROUP of its heads."""
    index = tl.load(order + tl.program_id(1)).to(tl.int64)
    split = tl.program_id(2)
    max_splits = tl.num_programs(2)
    context_len = tl.load(context_lens + index)
    first_key, first_tile, tiles, split_tiles, splits = tiles_and_splits(
        context_len, 0, window, max_splits, TILE, CHUNKED, None
    )
    if split >= splits:
        return
    table = block_tables + tl.load(rows + index).to(tl.int64) * table_stride
    begin = first_tile + split * split_tiles
    end = tl.minimum(begin + split_tiles, first_tile + tiles)

    lane = tl.arange(0, LANES)
    head = tl.program_id(0) * GROUP + lane
    is_query = (lane < GROUP) & (head < HEADS)
    q_tile, q_rest = load_queries(q, index * q_stride + head * WIDTH, is_query, LATENT, WIDTH, DIM, REST_DIM)
    slope = slopes
    if slopes is not None:
        slope = load_of_heads(slopes, head, is_query)
    acc = tl.zeros([LANES, DIM], tl.float32)
    peak = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    if sinks is not None:  # as a key without a value, of the first split
        peak = tl.where(split == 0, load_of_heads(sinks, head, is_query), peak)
        total = tl.where(split == 0, 1.0, total)
    blocks = load_blocks(table, begin * TILE, context_len, BLOCK_SIZE, TILE)
    for tile in range(begin, end):
        key = tile * TILE + tl.arange(0, TILE)
        seen = ((key >= first_key) & (key < context_len))[None, :]
        following = load_blocks(table, (tile + 1) * TILE, context_len, BLOCK_SIZE, TILE)
        acc, peak, total = attend_to_tile(
            q_tile, q_rest, kv, blocks, tile * TILE, context_len, block_stride, slot_stride, seen, acc, peak,
            total, scale_log2, softcap_log2, slope, context_len - 1, BLOCK_SIZE, LATENT, WIDTH, TILE, True,
        )  # fmt: skip
        blocks = following

    acc = acc / total[:, None]  # every split saw a key
    dim = tl.arange(0, DIM)
    mask = is_query[:, None] & (dim < LATENT)[None, :]
    if max_splits == 1:
        place = (index * HEADS + head)[:, None] * LATENT + dim[None, :]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)
    else:
        partial = (index * max_splits + split) * HEADS + head
        tl.store(partials + partial[:, None] * LATENT + dim[None, :], acc, mask=mask)
        tl.store(lse + partial, peak + tl.log2(total), mask=is_query)
