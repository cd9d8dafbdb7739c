"""Paged attention with one query per sequence: split-KV decode."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.fp8 import (
    as_exact,
    attend_paired,
    check_kv_scales,
    load_paired_tile,
    load_words,
    split_dims,
    words,
)
from kernels.launch import dependent_launch
from kernels.shared_prefix import MAX_SPANS, PrefixWorkspace, SharedPrefixes, prefix_attention, spans_of
from kernels.tile import LOG2_E, LOWEST, attend, check_attention_inputs, load_blocks, load_tile, tile_keys

MAX_SPLITS = 64
HEADROOM = tl.constexpr(12)  # log2 of how far a prefix may outweigh a key that fp16 holds in full
FULL_DEVICE = 256  # programs: about two on every multiprocessor, which is what their shared memory allows


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch of split decode attention, made once and reused by every layer and step.

    partials [rows × splits, num_q_heads, head_dim] f32, log-sum-exps lse [rows × splits, num_q_heads] f32.
    """

    partials: torch.Tensor
    lse: torch.Tensor
    prefix: PrefixWorkspace

    @classmethod
    def allocate(
        cls, max_batch: int, num_q_heads: int, head_dim: int, device: torch.device | str
    ) -> DecodeWorkspace:
        """Enough for every batch up to `max_batch`; only what leaves the device idle is split."""
        count = min(max_batch * MAX_SPLITS, FULL_DEVICE)
        return cls(
            torch.empty(count, num_q_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(count, num_q_heads, dtype=torch.float32, device=device),
            PrefixWorkspace.allocate(max_batch, num_q_heads, head_dim, device),
        )


@triton.jit
def _tiles_and_splits(
    context_len: tl.tensor,
    shared_len: tl.tensor,
    window: tl.tensor,
    max_splits: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The row's first visible key that is its own, first tile, tiles, tiles in a split, splits with work."""
    first_key = tl.where(window > 0, tl.maximum(context_len - window, 0), shared_len)
    first_tile = first_key // TILE
    tiles = tl.cdiv(context_len, TILE) - first_tile
    split_tiles = tl.maximum(tl.cdiv(tiles, max_splits), 1)
    return first_key, first_tile, tiles, split_tiles, tl.cdiv(tiles, split_tiles)


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
    bundle_of: tl.tensor,
    shared_lens: tl.tensor,
    prefix_partials: tl.tensor,
    prefix_lse: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
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
    DEPENDENT: tl.constexpr,
) -> None:
    """One split of one row's context for the query heads of one kv head."""
    kv_head = tl.program_id(0)
    index = tl.load(order + tl.program_id(1))
    split = tl.program_id(2)
    num_q_heads = tl.num_programs(0) * GROUP
    max_splits = tl.num_programs(2)
    context_len = tl.load(context_lens + index)
    shared_len = 0
    if bundle_of is not None:
        bundle = tl.load(bundle_of + index)
        shared_len = tl.load(shared_lens + bundle, mask=bundle >= 0, other=0)
    first_key, first_tile, tiles, split_tiles, splits = _tiles_and_splits(
        context_len, shared_len, window, max_splits, TILE
    )
    table = block_tables + tl.load(rows + index).to(tl.int64) * table_stride
    begin = first_tile + split * split_tiles
    blocks = load_blocks(table, begin * TILE, context_len, BLOCK_SIZE, TILE)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()  # q, K and V are the kernels' just before; what was read so far is older
    if split >= splits:  # 0 where the context is empty
        return

    lane = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM)
    q_head = kv_head * GROUP + lane
    q_mask = (lane < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q_offset = index.to(tl.int64) * q_stride + q_head[:, None] * HEAD_DIM + dim[None, :]
    q_tile = tl.load(q + q_offset, mask=q_mask, other=0.0)

    kv += kv_head * head_stride
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if bundle_of is not None:
        _, spans = spans_of(shared_len)
        for span in range(spans):
            part = (index.to(tl.int64) * MAX_SPANS + span) * num_q_heads + q_head
            part_lse = tl.load(prefix_lse + part, mask=lane < GROUP, other=0.0)
            value = tl.load(prefix_partials + part[:, None] * HEAD_DIM + dim[None, :], mask=q_mask, other=0.0)
            new_peak = tl.maximum(peak, part_lse)
            decay = tl.exp2(peak - new_peak)
            weight = tl.exp2(part_lse - new_peak)
            acc = acc * decay[:, None] + value * weight[:, None]
            total = total * decay + weight
            peak = new_peak
    if kv_scales is None:
        for tile in range(begin, tl.minimum(begin + split_tiles, first_tile + tiles)):
            k, v = load_tile(
                kv, blocks, tile * TILE, context_len, block_stride, part_stride, slot_stride,
                BLOCK_SIZE, HEAD_DIM, DIM, TILE, True,
            )  # fmt: skip
            blocks = load_blocks(table, (tile + 1) * TILE, context_len, BLOCK_SIZE, TILE)
            key = tile * TILE + tl.arange(0, TILE)
            seen = (key >= first_key) & (key < context_len)
            acc, peak, total = attend(q_tile, k, v, seen[None, :], acc, peak, total, scale_log2, True)
    else:
        kv_scales += kv_head * scale_head_stride
        q_exact = as_exact(q_tile)
        if bundle_of is not None:
            peak -= HEADROOM
            total *= 2**HEADROOM
            acc *= 2**HEADROOM
        even, odd = split_dims(acc)
        for tile in range(begin, tl.minimum(begin + split_tiles, first_tile + tiles)):
            k, v = load_paired_tile(
                kv, blocks, tile * TILE, context_len, block_stride, part_stride, slot_stride,
                BLOCK_SIZE, HEAD_DIM, DIM, TILE,
            )  # fmt: skip
            scales = load_words(
                kv_scales, blocks, tile * TILE, context_len, scale_block_stride, BLOCK_SIZE, TILE, True
            )
            blocks = load_blocks(table, (tile + 1) * TILE, context_len, BLOCK_SIZE, TILE)
            key = tile * TILE + tl.arange(0, TILE)
            seen = (key >= first_key) & (key < context_len)
            even, odd, peak, total = attend_paired(
                q_exact, k, v, scales, seen[None, :], even, odd, peak, total, scale_log2
            )
        acc = tl.interleave(even, odd)

    acc = acc / total[:, None]  # every split saw a key
    if splits <= 1:
        offset = (index.to(tl.int64) * num_q_heads + q_head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + offset, acc.to(out.dtype.element_ty), mask=q_mask)
    else:
        partial = (index.to(tl.int64) * max_splits + split) * num_q_heads + q_head
        tl.store(partials + partial[:, None] * HEAD_DIM + dim[None, :], acc, mask=q_mask)
        tl.store(lse + partial, peak + tl.log2(total), mask=lane < GROUP)


@triton.jit(do_not_specialize=["window", "max_splits"])
def _merge_kernel(
    out: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    context_lens: tl.tensor,
    window: tl.tensor,
    max_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Merge one head's split results by their log-sum-exps (base 2), where the row was split at all."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    index = tl.program_id(1)
    num_q_heads = tl.num_programs(0)
    context_len = tl.load(context_lens + index)
    _, _, _, _, splits = _tiles_and_splits(context_len, 0, window, max_splits, TILE)
    if splits <= 1:
        return
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM)
    partial = (index.to(tl.int64) * max_splits + split) * num_q_heads + head
    split_lse = tl.load(lse + partial, mask=split < splits, other=float("-inf"))
    weights = tl.exp2(split_lse - tl.max(split_lse, 0))
    mask = (split < splits)[:, None] & (dim < HEAD_DIM)[None, :]
    values = tl.load(partials + partial[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    merged = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    offset = (index.to(tl.int64) * num_q_heads + head) * HEAD_DIM + dim
    tl.store(out + offset, merged.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def plan_splits(batch: int, num_kv_heads: int, max_tiles: int) -> int:
    """How many splits of each row fill the device, from what is known without looking at the lengths."""
    return max(min(FULL_DEVICE // (batch * num_kv_heads), MAX_SPLITS, max_tiles), 1)


def decode_attention(
    q: torch.Tensor,
    out: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    order: torch.Tensor,
    scale: float,
    window: int,
    workspace: DecodeWorkspace,
    max_splits: int | None = None,
    shared: SharedPrefixes | None = None,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Attention of each row's newest token to its context, to the first B tokens of `out` [T, Hq, D].

    q [T, Hq, D]: its first B tokens are the rows' queries, at position context_len − 1 each. kv
    [blocks, 2, Hkv, block_size, D], block_tables [*, max_blocks] i32 indexed by rows [B] i32, context_lens
    [B] i32: a row without context writes nothing. order [B] i32 is a permutation of 0 … B − 1, best by
    falling context length: a long row that starts last keeps the device waiting. These four must be older
    than the kernel just before this one, which may still run when they are read. `window` limits attention
    to that many newest keys, 0 means all. Grid and launches depend on shapes only, so CUDA graphs may capture
    it. `max_splits` overrides `plan_splits`. Split-KV after Flash-Decoding (Dao et al. 2023). What the rows
    `shared` with others is read once for all of them (older as well; no use with a window). kv_scales
    [blocks, Hkv, block_size, 2] are those of an fp8 kv, and with them q must fit fp16 (see `kernels.fp8`).
    """
    check_attention_inputs(q, out, kv)
    check_kv_scales(kv, kv_scales)
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv.shape[2:4]
    batch = rows.shape[0]
    if batch == 0:
        return
    group = num_q_heads // num_kv_heads
    dim = triton.next_power_of_2(head_dim)
    tile = tile_keys(dim, q.element_size())
    if kv_scales is not None and q.element_size() == 2:
        tile *= 2  # in as many bytes
    max_tiles = triton.cdiv(block_tables.shape[1] * block_size, tile)
    prefixes: tuple[torch.Tensor | None, ...] = (None, None, None, None)
    if shared is not None and window == 0:
        max_splits = 1  # what is left of such a batch is short
        prefix_attention(q, kv, block_tables, rows, shared, scale, workspace.prefix, kv_scales)
        prefixes = (shared.bundle_of, shared.lens, workspace.prefix.partials, workspace.prefix.lse)
    else:
        max_splits = max_splits or plan_splits(batch, num_kv_heads, max_tiles)
    if max_splits > 1 and batch * max_splits * num_q_heads > workspace.lse.numel():
        raise ValueError(
            f"{batch} rows × {max_splits} splits × {num_q_heads} heads exceed the workspace's "
            f"{workspace.lse.numel()} partial results; allocate it for the largest batch"
        )
    _decode_kernel[num_kv_heads, batch, max_splits](
        out, workspace.partials, workspace.lse, q, kv, block_tables, rows, context_lens, order,
        *prefixes, scale * LOG2_E, window,
        q.stride(0), block_tables.stride(0), *kv.stride()[:4], *words(kv_scales),
        GROUP=group, BLOCK_M=max(16, triton.next_power_of_2(group)), BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim, DIM=dim, TILE=tile, num_warps=4, num_stages=4, **dependent_launch(q.device),
    )  # fmt: skip
    if max_splits > 1:
        _merge_kernel[num_q_heads, batch](
            out, workspace.partials, workspace.lse, context_lens, window, max_splits,
            HEAD_DIM=head_dim, DIM=dim, TILE=tile, SPLITS=MAX_SPLITS, num_warps=4,
            **dependent_launch(q.device),
        )  # fmt: skip
