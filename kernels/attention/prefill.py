"""Paged attention with many queries per sequence: prefill, chunked prefill and extend."""

from __future__ import annotations

from enum import Enum

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from quire.kernels.attention.batch import AttentionLayer, PrefillBatch
from quire.kernels.attention.dequantize import dequantize
from quire.kernels.attention.hopper_prefill import prefill as hopper
from quire.kernels.attention.key_tiles import KeyTiles, key_tiles
from quire.kernels.attention.kv_tile import (
    LOG2_E,
    LOWEST,
    attend,
    check_attention_inputs,
    load_blocks,
    load_tile,
    tile_keys,
)
from quire.kernels.attention.softmax import load_of_heads, weights_reference
from quire.kernels.formats.fp8 import as_exact
from quire.kernels.formats.kv_format import KVFormat
from quire.kernels.formats.kv_scales import words
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import Gpu, gpu_of

STAGES = 2


class PrefillKernel(Enum):
    """The kernel that attends from tokens of a prompt."""

    HOPPER = "attention.hopper_prefill"
    TRITON = "attention.prefill"


@triton.jit
def find_sequence(
    query_starts: tl.tensor, num_sequences: tl.tensor, tile: tl.tensor, BLOCK_Q: tl.constexpr
) -> tl.tensor:
    """Return the sequence of a query tile, and the tile's number within it.

    Sequence p owns the tiles from query_starts[p] // BLOCK_Q + p on, which are at least as many as it needs;
    `tile` counts from the first one's. Counting the sequences that begin by this tile finds it, mostly in
    one load; bisection is a chain of them.
    """
    begun = 0
    tile += tl.load(query_starts) // BLOCK_Q
    for first in range(0, num_sequences, 32):
        sequence = first + tl.arange(0, 32)
        starts = tl.load(query_starts + sequence, mask=sequence < num_sequences, other=0)
        begun += tl.sum(((starts // BLOCK_Q + sequence <= tile) & (sequence < num_sequences)).to(tl.int32), 0)
    return begun - 1, tile - (tl.load(query_starts + begun - 1) // BLOCK_Q + begun - 1)


@triton.jit(do_not_specialize=["num_sequences", "window"])
def _prefill_kernel(
    out: tl.tensor,
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
    part_stride: tl.tensor,
    head_stride: tl.tensor,
    slot_stride: tl.tensor,
    kv_scales: tl.tensor,
    scale_block_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    PLANES: tl.constexpr,
    CHUNKED: tl.constexpr,
) -> None:
    """Attend from BLOCK_M // GROUP consecutive queries of a sequence, for all heads of one kv head."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    # A sequence's later tiles see more keys: start the heavy ones first.
    sequence, query_tile = find_sequence(
        query_starts, num_sequences, tl.num_programs(1) - 1 - tl.program_id(1), BLOCK_Q
    )
    query_start = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - query_start
    first_query = query_tile * BLOCK_Q
    if first_query >= query_len:
        return
    context_len = tl.load(context_lens + sequence)
    first_position = context_len - query_len + first_query
    end = tl.minimum(first_position + BLOCK_Q, context_len)  # one past the last position

    lane = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM)
    query = first_query + lane // GROUP
    q_head = kv_head * GROUP + lane % GROUP
    token = (query_start + query).to(tl.int64)
    q_mask = ((lane < BLOCK_Q * GROUP) & (query < query_len))[:, None] & (dim < HEAD_DIM)[None, :]
    q_offset = (token * q_stride + q_head * HEAD_DIM)[:, None] + dim[None, :]
    q_tile = tl.load(q + q_offset, mask=q_mask, other=0.0)

    kv += kv_head * head_stride
    if kv_scales is not None:
        kv_scales += kv_head * scale_head_stride
        q_tile = as_exact(q_tile, kv)
    table = block_tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:  # as a key without a value
        peak = load_of_heads(sinks, q_head, lane < BLOCK_Q * GROUP)
        total += 1.0
    slope = slopes
    if slopes is not None:
        slope = load_of_heads(slopes, q_head, lane < BLOCK_Q * GROUP)
    # Without a window all queries see all keys up to the first position's: whole tiles that need no mask.
    first_tile = 0
    masked_tile = tl.maximum(first_position + 1, 0) // TILE
    if CHUNKED:
        first_tile = tl.maximum(first_position, 0) // window * window // TILE
        masked_tile = first_tile
    elif window > 0:
        first_tile = tl.maximum(first_position + 1 - window, 0) // TILE
        masked_tile = first_tile
    blocks = load_blocks(table, first_tile * TILE, context_len, BLOCK_SIZE, TILE)
    for tile in range(first_tile, masked_tile):
        k, v = load_tile(
            kv, blocks, tile * TILE, context_len, block_stride, part_stride, slot_stride,
            BLOCK_SIZE, HEAD_DIM, DIM, TILE, False, kv_scales, scale_block_stride, q_tile.dtype, PLANES,
        )  # fmt: skip
        blocks = load_blocks(table, (tile + 1) * TILE, context_len, BLOCK_SIZE, TILE)
        acc, peak, total = attend(
            q_tile, k, v, True, acc, peak, total, scale_log2, False, softcap_log2,
            slope, (first_position + lane // GROUP)[:, None], tile * TILE,
        )  # fmt: skip
    position = first_position + lane // GROUP
    for tile in range(masked_tile, tl.cdiv(end, TILE)):
        k, v = load_tile(
            kv, blocks, tile * TILE, context_len, block_stride, part_stride, slot_stride,
            BLOCK_SIZE, HEAD_DIM, DIM, TILE, True, kv_scales, scale_block_stride, q_tile.dtype, PLANES,
        )  # fmt: skip
        blocks = load_blocks(table, (tile + 1) * TILE, context_len, BLOCK_SIZE, TILE)
        age = position[:, None] - (tile * TILE + tl.arange(0, TILE))[None, :]
        if CHUNKED:
            seen = (age >= 0) & (age <= (position % window)[:, None])
        else:
            seen = (age >= 0) & ((age < window) | (window == 0))
        acc, peak, total = attend(
            q_tile, k, v, seen, acc, peak, total, scale_log2, True, softcap_log2,
            slope, position[:, None], tile * TILE,
        )  # fmt: skip

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    offset = ((token * tl.num_programs(0) * GROUP + q_head) * HEAD_DIM)[:, None] + dim[None, :]
    tl.store(out + offset, acc.to(out.dtype.element_ty), mask=q_mask)


def prefill_tiles(gpu: Gpu, lanes: int, dim: int, dtype: torch.dtype, held: KVFormat) -> KeyTiles:
    """Return the tiles of a program that attends with `lanes` queries of dim, a power of two."""
    return key_tiles(gpu, KeyTiles(tile_keys(dim, dtype.itemsize), STAGES), lanes, dim, dtype, held)


def prefill(
    q: torch.Tensor,
    out: torch.Tensor,
    batch: PrefillBatch,
    layer: AttentionLayer,
    cache: LayerCache,
    *,
    by: PrefillKernel | None = None,
) -> None:
    """Attend causally from the newest tokens of several rows to their contexts, to `out` [T, Hq, D].

    q [T, Hq, D] holds the queries of the batch's rows, and `out` gets their results at the same tokens; it is
    left alone elsewhere. Their own K and V are already in the cache. A row without context (padding) gets
    zeros. In fp8 q must fit fp16. With `cache.dequantized`, where `attention.write_kv` has written the
    queries' own K and V, what else is read of a cache in fp12 is first brought there, if
    `attention.hopper_prefill` attends. The grid depends only on shapes and on `max_query_len`, an upper
    bound. After FlashAttention-2 (Dao 2023).

    by: the kernel; None is `attention.hopper_prefill` where that can be and is quicker.
    """
    check_attention_inputs(q, out, cache)
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = cache.kv_heads, cache.block_size
    num_sequences = batch.rows.shape[0]
    if num_tokens == 0 or num_sequences == 0:
        return
    group = num_q_heads // num_kv_heads
    numbers = cache.kv if cache.dequantized is None else cache.dequantized
    if by is None:
        takes = (
            layer.plain
            and numbers.dtype == q.dtype
            and hopper.takes_heads(gpu_of(q.device), q.dtype, head_dim, group, block_size)
        )
        quick = not layer.window and hopper.prefers(
            batch.max_query_len, group, dequantized=cache.dequantized is not None
        )
        by = PrefillKernel.HOPPER if takes and quick else PrefillKernel.TRITON
    if by is PrefillKernel.HOPPER:
        if cache.format.scaled:
            dequantize(batch, cache)
        hopper.hopper_prefill(q, out, numbers, batch, layer)
        return
    dim = triton.next_power_of_2(head_dim)
    block_m = 128 if dim * q.element_size() <= 256 and batch.max_query_len * group > 64 else 64
    tiles = prefill_tiles(gpu_of(q.device), block_m, dim, q.dtype, cache.format)
    _prefill_kernel[num_kv_heads, num_tokens // (block_m // group) + num_sequences](
        out, q, cache.kv, batch.block_tables, batch.rows, batch.query_starts, batch.context_lens,
        num_sequences, layer.scale * LOG2_E, layer.window, layer.softcap * LOG2_E or None, layer.sinks,
        layer.slopes, q.stride(0), batch.block_tables.stride(0), *cache.kv.stride()[:4], *words(cache.scales),
        GROUP=group, BLOCK_M=block_m, BLOCK_SIZE=block_size, HEAD_DIM=head_dim, DIM=dim,
        TILE=tiles.keys, PLANES=bool(cache.format.planes), CHUNKED=layer.chunked,
        num_warps=max(block_m // 16, dim // 64), num_stages=tiles.stages,
        maxnreg=128 if block_m == 128 else None,  # two programs on a multiprocessor: a third faster
    )  # fmt: skip


def prefill_reference(
    q: torch.Tensor, out: torch.Tensor, batch: PrefillBatch, layer: AttentionLayer, cache: LayerCache
) -> None:
    """Do the same as `prefill` in plain torch, on any device: one sequence after the other."""
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size, window = cache.kv_heads, cache.block_size, layer.window
    heads = torch.arange(num_kv_heads, device=q.device)[:, None]
    starts = batch.query_starts.tolist()
    for row, begin, end, context_len in zip(
        batch.rows.tolist(), starts[:-1], starts[1:], batch.context_lens.tolist(), strict=True
    ):
        if context_len == 0:
            out[begin:end] = 0
        if begin == end or context_len == 0:
            continue
        first_position = context_len - (end - begin)
        # Blocks behind the first query's window may be another's by now.
        begin_of_window = first_position // window * window if layer.chunked else first_position + 1 - window
        first_block = max(0, begin_of_window) // block_size if window else 0
        first_key = first_block * block_size
        table = batch.block_tables[row, first_block : -(-context_len // block_size)].long()
        num_keys = context_len - first_key
        parts = [
            cache.read((table, torch.full_like(heads, part), heads)).flatten(1, 2)[:, :num_keys]
            for part in range(cache.kv.shape[1])
        ]
        k, v = parts[0], parts[0][..., : cache.latent] if cache.latent else parts[1]
        position = torch.arange(first_position, context_len, device=q.device)[:, None]
        key = torch.arange(first_key, context_len, device=q.device)
        seen = key <= position
        if layer.chunked:
            seen &= key >= position // window * window
        elif window:
            seen &= key > position - window
        # Grouped query heads become more queries of their kv head, so K and V are never repeated.
        group = num_q_heads // num_kv_heads
        grouped = q[begin:end].float().reshape(end - begin, num_kv_heads, group, head_dim)
        grouped = grouped.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
        if layer.plain:
            attended = F.scaled_dot_product_attention(
                grouped[None], k[None], v[None], attn_mask=seen.repeat(group, 1), scale=layer.scale
            )
        else:
            sinks = None
            if layer.sinks is not None:
                sinks = layer.sinks.view(num_kv_heads, group, 1).repeat_interleave(end - begin, 1)
            scores = grouped @ k.mT * layer.scale
            if layer.slopes is not None:
                slopes = layer.slopes.view(num_kv_heads, group, 1).repeat_interleave(end - begin, 1)
                scores += slopes * (key - position).repeat(group, 1)
            attended = weights_reference(scores, ~seen.repeat(group, 1), layer.softcap, sinks) @ v
        attended = attended.view(num_kv_heads, group, end - begin, v.shape[-1]).permute(2, 0, 1, 3)
        out[begin:end] = attended.reshape(end - begin, num_q_heads, v.shape[-1]).to(q.dtype)
