"""Attention of rows to a prefix that their tables share: read once for a cascade of rows, not once a row.

The queries of a cascade's rows fill the M side of one product, which for a single row is mostly padding. What
comes of it are partial results, which each row's own program (`attention.decode`) takes in. After
Hydragen (Juravsky et al. 2024) and FlashInfer's cascade, at the granularity of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.attention.key_tiles import KeyTiles, key_tiles
from quire.kernels.attention.kv_tile import LOG2_E, LOWEST, attend, load_blocks, load_tile, tile_keys
from quire.kernels.formats.fp8 import as_exact
from quire.kernels.formats.kv_format import KVFormat
from quire.kernels.formats.kv_scales import words
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import Gpu, gpu_of
from quire.kernels.launch import dependent_launch

LANES = 64  # queries of a cascade, for each kv head
SHORTEST = tl.constexpr(256)  # tokens: a shorter prefix is cheaper read by each row
QUANTUM = tl.constexpr(64)  # tokens: prefixes are whole tiles
SPAN = tl.constexpr(1024)  # tokens that a program reads, or a quarter of the prefix
MAX_SPANS = tl.constexpr(4)
STAGES = 3
COLUMNS = tl.constexpr(64)  # of the tables that are compared at once


def rows_of_cascade(group: int) -> int:
    """Return how many rows a cascade has room for, where a kv head serves `group` query heads."""
    return LANES // group


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Cascades of a batch's rows whose tables begin alike, and how long they do.

    members [N, R] i32: indices in the batch, each cascade's first ones, -1 after them; cascade_of [B] i32: of
    each of the batch's rows, -1 for none; lens [N] i32: tokens, as `shared_lens` finds them.
    """

    members: torch.Tensor
    cascade_of: torch.Tensor
    lens: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefixWorkspace:
    """Scratch for a prefix's partial results, made once and reused by every layer and step.

    partials [rows × MAX_SPANS, num_q_heads, head_dim] f32, log-sum-exps lse [rows × MAX_SPANS, num_q_heads]
    f32.
    """

    partials: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def allocate(
        cls, max_batch: int, num_q_heads: int, head_dim: int, device: torch.device | str
    ) -> PrefixWorkspace:
        count = max_batch * MAX_SPANS.value
        return cls(
            torch.empty(count, num_q_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(count, num_q_heads, dtype=torch.float32, device=device),
        )


@triton.jit
def spans_of(shared_len: tl.tensor) -> tl.tensor:
    """Tokens in a span of a prefix, and how many spans it has."""
    tokens = tl.maximum(tl.cdiv(tl.cdiv(shared_len, MAX_SPANS), QUANTUM) * QUANTUM, SPAN)
    return tokens, tl.cdiv(shared_len, tokens)


@triton.jit
def _lens_kernel(
    lens: tl.tensor,
    members: tl.tensor,
    rows: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    table_stride: tl.tensor,
    ROWS: tl.constexpr,
    LANE_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    cascade = tl.program_id(0)
    lane = tl.arange(0, LANE_ROWS)
    member = tl.load(members + cascade * ROWS + lane, mask=lane < ROWS, other=-1)
    is_row = member >= 0
    first = tl.load(members + cascade * ROWS)
    # The block of the newest token is the row's own, and nothing is shared past the shortest context.
    cached = tl.load(context_lens + member, mask=is_row, other=2147483647) - 1
    common = tl.where(first >= 0, tl.min(cached, 0) // BLOCK_SIZE, 0)
    table = tl.load(rows + member, mask=is_row, other=0).to(tl.int64) * table_stride
    first_table = tl.load(rows + tl.maximum(first, 0)).to(tl.int64) * table_stride
    column = 0
    while column < common:
        entry = column + tl.arange(0, COLUMNS)
        inside = entry < common
        expected = tl.load(block_tables + first_table + entry, mask=inside, other=0)
        mask = is_row[:, None] & inside[None, :]
        found = tl.load(block_tables + table[:, None] + entry[None, :], mask=mask, other=0)
        differs = mask & (found != expected[None, :])
        common = tl.min(tl.min(tl.where(differs, entry[None, :], common), 1), 0)
        column += COLUMNS
    tokens = common * BLOCK_SIZE // QUANTUM * QUANTUM
    tl.store(lens + cascade, tl.where(tokens < SHORTEST, 0, tokens))


def shared_lens(
    members: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Return how many tokens the rows of each cascade have in common, in whole tiles: lens [N] i32.

    members [N, R] i32 as in SharedPrefixes; rows [B] i32 indexes block_tables [*, max_blocks] i32,
    context_lens [B] i32. Full blocks that all of them name at the same place count; less than SHORTEST is 0.
    """
    cascades, width = members.shape
    lens = torch.empty(cascades, dtype=torch.int32, device=members.device)
    _lens_kernel[(cascades,)](
        lens, members, rows, context_lens, block_tables, block_tables.stride(0),
        ROWS=width, LANE_ROWS=triton.next_power_of_2(width), BLOCK_SIZE=block_size, num_warps=4,
    )  # fmt: skip
    return lens


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("block_tables", "rows", "members", "lens"))


@triton.jit
def _prefix_kernel(
    partials: tl.tensor,
    lse: tl.tensor,
    q: tl.tensor,
    kv: tl.tensor,
    block_tables: tl.tensor,
    rows: tl.tensor,
    members: tl.tensor,
    lens: tl.tensor,
    scale_log2: tl.tensor,
    softcap_log2: tl.tensor,
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
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    PLANES: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """One span of a cascade's prefix for the cascade's query heads of one kv head."""
    kv_head = tl.program_id(0)
    cascade = tl.program_id(1)
    span = tl.program_id(2)
    num_q_heads = tl.num_programs(0) * GROUP
    shared_len = tl.load(lens + cascade)
    span_tokens, _ = spans_of(shared_len)
    begin = span * span_tokens
    end = tl.minimum(begin + span_tokens, shared_len)
    first = tl.maximum(tl.load(members + cascade * ROWS), 0)
    table = block_tables + tl.load(rows + first).to(tl.int64) * table_stride
    blocks = load_blocks(table, begin, end, BLOCK_SIZE, TILE)
    lane = tl.arange(0, BLOCK_M)
    member = tl.load(members + cascade * ROWS + lane // GROUP, mask=lane < ROWS * GROUP, other=-1)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()  # for q, K and V; what was read so far was there before those kernels began
    if begin >= shared_len:
        return

    dim = tl.arange(0, DIM)
    is_query = member >= 0
    q_head = kv_head * GROUP + lane % GROUP
    mask = is_query[:, None] & (dim < HEAD_DIM)[None, :]
    q_offset = (member.to(tl.int64) * q_stride + q_head * HEAD_DIM)[:, None] + dim[None, :]
    q_tile = tl.load(q + q_offset, mask=mask, other=0.0)

    kv += kv_head * head_stride
    if kv_scales is not None:
        kv_scales += kv_head * scale_head_stride
        q_tile = as_exact(q_tile, kv)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for key in range(begin, end, TILE):
        k, v = load_tile(
            kv, blocks, key, end, block_stride, part_stride, slot_stride,
            BLOCK_SIZE, HEAD_DIM, DIM, TILE, False, kv_scales, scale_block_stride, q_tile.dtype, PLANES,
        )  # fmt: skip
        blocks = load_blocks(table, key + TILE, end, BLOCK_SIZE, TILE)
        acc, peak, total = attend(q_tile, k, v, is_query, acc, peak, total, scale_log2, False, softcap_log2)

    partial = (member.to(tl.int64) * MAX_SPANS + span) * num_q_heads + q_head
    tl.store(partials + partial[:, None] * HEAD_DIM + dim[None, :], acc / total[:, None], mask=mask)
    tl.store(lse + partial, peak + tl.log2(total), mask=is_query)


def prefix_tiles(gpu: Gpu, dim: int, dtype: torch.dtype, held: KVFormat) -> KeyTiles:
    """Return the tiles that a program reads of a prefix for heads of dim, a power of two."""
    return key_tiles(gpu, KeyTiles(tile_keys(dim, dtype.itemsize), STAGES), LANES, dim, dtype, held)


def prefix_attention(
    q: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    shared: SharedPrefixes,
    scale: float,
    workspace: PrefixWorkspace,
    softcap: float = 0.0,
) -> None:
    """Attend to the prefixes of the cascades' rows, leaving partial results in the workspace.

    q [T, Hq, D]: its first B tokens are the rows' queries; block_tables [*, max_blocks] i32 indexed by rows
    [B] i32. Tables, rows and `shared` are read before kernels ahead have ended: they must be complete when
    the kernel just ahead begins.
    """
    num_q_heads, head_dim = q.shape[1:]
    kv, num_kv_heads, block_size = cache.kv, cache.kv_heads, cache.block_size
    group = num_q_heads // num_kv_heads
    cascades, width = shared.members.shape
    dim = triton.next_power_of_2(head_dim)
    tiles = prefix_tiles(gpu_of(q.device), dim, q.dtype, cache.format)
    _prefix_kernel[num_kv_heads, cascades, MAX_SPANS.value](
        workspace.partials, workspace.lse, q, kv, block_tables, rows, shared.members, shared.lens,
        scale * LOG2_E, softcap * LOG2_E or None,
        q.stride(0), block_tables.stride(0), *kv.stride()[:4], *words(cache.scales),
        GROUP=group, ROWS=width, BLOCK_M=LANES, BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim, DIM=dim, TILE=tiles.keys, PLANES=bool(cache.format.planes),
        num_warps=max(4, dim // 64), num_stages=tiles.stages,
        **dependent_launch(q.device),
    )  # fmt: skip
