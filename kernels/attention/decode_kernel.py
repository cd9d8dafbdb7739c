"""The kernel of `attention.decode`: one program for a split of a row's context and one kv head."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.attention.cascade import MAX_SPANS, spans_of
from quire.kernels.attention.kv_tile import LOWEST, ask_for_tile, attend, load_blocks, load_tile
from quire.kernels.attention.qk_norm_rope import load_angles, load_weights, normed_and_rotated, other_half
from quire.kernels.attention.softmax import capped, load_of_heads
from quire.kernels.attention.splits import tiles_and_splits
from quire.kernels.formats import fp12
from quire.kernels.formats.fp8 import as_exact, attend_paired, load_paired_tile, split_dims
from quire.kernels.formats.kv_scales import load_words, packed

HEADROOM = tl.constexpr(12)  # log2 of how far a prefix or sink may outweigh a key that fp16 holds in full


@triton.jit
def _end_after_the_kernel_ahead() -> None:
    """Have the grid end no sooner, by its last program: others would keep their places from those to come."""
    ends = tl.program_id(0) == tl.num_programs(0) - 1
    ends &= tl.program_id(1) == tl.num_programs(1) - 1
    if ends & (tl.program_id(2) == tl.num_programs(2) - 1):
        gdc_wait()


# Before kernels ahead have ended, see `kernels.launch`. Of the cache only tokens that it held before the
# kernel just ahead began; q only BESIDE a prefill, which leaves it alone.
READS_EARLY = frozenset(
    (
        *("block_tables", "rows", "context_lens", "order", "cascade_of", "shared_lens"),
        *("rope", "q_norm", "k_norm", "q", "kv", "kv_scales"),
    )
)


@triton.jit(do_not_specialize=["window"])
def decode_kernel(
    out: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    q: tl.tensor,
    kv: tl.tensor,
    block_tables: tl.tensor,
    rows: tl.tensor,
    context_lens: tl.tensor,
    order: tl.tensor,
    cascade_of: tl.tensor,
    shared_lens: tl.tensor,
    prefix_partials: tl.tensor,
    prefix_lse: tl.tensor,
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
    rope: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    eps: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    PLANES: tl.constexpr,
    CHUNKED: tl.constexpr,
    SPARING: tl.constexpr,
    NEW: tl.constexpr,
    FIRST: tl.constexpr,
    EARLY: tl.constexpr,
    BESIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """One split of one row's context for the query heads of one kv head.

    NEW: heads come as the projection gave them; the last split sees to the newest token's K and V, which the
    cache does not hold yet, and attends to them as it will. FIRST: of what it does hold a split's first tile
    is read while that projection runs. EARLY: so many tiles are brought to the L2 cache before the kernel
    ahead has ended. BESIDE: nothing waits for the kernel ahead but the end of this one.
    """
    kv_head = tl.program_id(0)
    index = tl.load(order + tl.program_id(1))
    split = tl.program_id(2)
    num_q_heads = tl.num_programs(0) * GROUP
    max_splits = tl.num_programs(2)
    context_len = tl.load(context_lens + index)
    shared_len = 0
    if cascade_of is not None:
        cascade = tl.load(cascade_of + index)
        shared_len = tl.load(shared_lens + cascade, mask=cascade >= 0, other=0)
    first_key, first_tile, tiles, split_tiles, splits = tiles_and_splits(
        context_len, shared_len, window, max_splits, TILE, CHUNKED, SPARING
    )
    if split >= tl.maximum(splits, 1):  # a row's first split waits for the kernels ahead, so this need not
        if BESIDE:
            _end_after_the_kernel_ahead()
        return
    table = block_tables + tl.load(rows + index).to(tl.int64) * table_stride
    begin = first_tile + split * split_tiles
    end = tl.minimum(begin + split_tiles, first_tile + tiles)
    cached_len = context_len - 1 if NEW else context_len
    kv += kv_head * head_stride
    if kv_scales is not None:
        kv_scales += kv_head * scale_head_stride
    blocks = load_blocks(table, begin * TILE, context_len, BLOCK_SIZE, TILE)
    dim = tl.arange(0, DIM)
    if FIRST:
        k, v = load_tile(
            kv, blocks, begin * TILE, cached_len, block_stride, part_stride, slot_stride,
            BLOCK_SIZE, HEAD_DIM, DIM, TILE, True, kv_scales, scale_block_stride, q.dtype.element_ty, PLANES,
        )  # fmt: skip
    if NEW:
        q_weight, q_other_weight = load_weights(q_norm, dim, HEAD_DIM)
        k_weight, k_other_weight = load_weights(k_norm, dim, HEAD_DIM)
        cos, sin = load_angles(rope, tl.maximum(cached_len, 0), dim, HEAD_DIM)
        block = tl.load(table + cached_len // BLOCK_SIZE, mask=splits > 0, other=0).to(tl.int64)
    if DEPENDENT:
        for ahead in tl.static_range(EARLY):
            tile = begin + ahead
            if tile < end:
                asked = load_blocks(table, tile * TILE, context_len, BLOCK_SIZE, TILE)
                ask_for_tile(
                    kv, asked, tile * TILE, block_stride, part_stride, slot_stride,
                    BLOCK_SIZE, HEAD_DIM, DIM, TILE, PLANES,
                )  # fmt: skip
        gdc_launch_dependents()
        if not BESIDE:
            gdc_wait()  # for q, K and V; what was read so far was there before those kernels began
    if splits == 0:  # the context is empty
        if BESIDE:
            _end_after_the_kernel_ahead()
        return

    lane = tl.arange(0, BLOCK_M)
    q_head = kv_head * GROUP + lane
    q_mask = (lane < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    token = q + index.to(tl.int64) * q_stride
    q_tile = tl.load(token + q_head[:, None] * HEAD_DIM + dim[None, :], mask=q_mask, other=0.0)
    if NEW:
        in_head = (dim < HEAD_DIM)[None, :]
        other = other_half(dim, HEAD_DIM)[None, :]
        k_head = token + (num_q_heads + kv_head + tl.zeros([1, 1], tl.int32)) * HEAD_DIM
        q_other = tl.load(token + q_head[:, None] * HEAD_DIM + other, mask=q_mask, other=0.0)
        new_k = tl.load(k_head + dim[None, :], mask=in_head, other=0.0)
        k_other = tl.load(k_head + other, mask=in_head, other=0.0)
        new_v = tl.load(k_head + tl.num_programs(0) * HEAD_DIM + dim[None, :], mask=in_head, other=0.0)
        ROTATED: tl.constexpr = rope is not None
        q_tile = normed_and_rotated(
            q_tile, q_other, q_weight, q_other_weight, cos, sin, eps, q_norm, ROTATED, HEAD_DIM
        )
        new_k = normed_and_rotated(
            new_k, k_other, k_weight, k_other_weight, cos, sin, eps, k_norm, ROTATED, HEAD_DIM
        )

    slope = slopes
    if slopes is not None:
        slope = load_of_heads(slopes, q_head, lane < GROUP)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:  # as a key without a value, of the first split
        sink = load_of_heads(sinks, q_head, lane < GROUP)
        peak = tl.where(split == 0, sink, peak)
        total = tl.where(split == 0, 1.0, total)
    if cascade_of is not None:
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
    if NEW:
        last = split == splits - 1
        slot = kv + block * block_stride + cached_len % BLOCK_SIZE * slot_stride
        if kv_scales is None:
            tl.store(slot + dim[None, :], new_k, mask=in_head & last)
            tl.store(slot + part_stride + dim[None, :], new_v, mask=in_head & last)
        else:
            new_k, new_v = new_k.to(tl.float32), new_v.to(tl.float32)
            if last:
                new_k, k_scale = fp12.quantized(new_k)
                new_v, v_scale = fp12.quantized(new_v)
                fp12.store_vector(slot, new_k, BLOCK_SIZE)
                fp12.store_vector(slot + part_stride, new_v, BLOCK_SIZE)
                word = block * scale_block_stride + cached_len % BLOCK_SIZE + tl.zeros([1, 1], tl.int32)
                tl.store(kv_scales + word, packed(k_scale, v_scale))
                new_k *= k_scale.to(tl.float32)
                new_v *= v_scale.to(tl.float32)
        score = tl.sum(q_tile.to(tl.float32) * new_k.to(tl.float32), 1) * scale_log2
        if softcap_log2 is not None:
            score = capped(score, softcap_log2)
        if sinks is None:
            peak = tl.where(last, score, peak)
            total = tl.where(last, 1.0, total)
            acc += tl.where(last, new_v.to(tl.float32), 0.0)
        else:
            new_peak = tl.where(last, tl.maximum(peak, score), peak)
            weight = tl.where(last, tl.exp2(score - new_peak), 0.0)
            total = total * tl.exp2(peak - new_peak) + weight
            acc += weight[:, None] * new_v.to(tl.float32)
            peak = new_peak
    if kv_scales is None or PLANES:
        if FIRST:
            key = begin * TILE + tl.arange(0, TILE)
            seen = (key >= first_key) & (key < cached_len)
            begin += 1
            blocks = load_blocks(table, begin * TILE, context_len, BLOCK_SIZE, TILE)
            acc, peak, total = attend(
                q_tile, k, v, seen[None, :], acc, peak, total, scale_log2, True, softcap_log2,
                slope, context_len - 1, (begin - 1) * TILE,
            )  # fmt: skip
        for tile in range(begin, end):
            k, v = load_tile(
                kv, blocks, tile * TILE, cached_len, block_stride, part_stride, slot_stride,
                BLOCK_SIZE, HEAD_DIM, DIM, TILE, True, kv_scales, scale_block_stride, q_tile.dtype, PLANES,
            )  # fmt: skip
            blocks = load_blocks(table, (tile + 1) * TILE, context_len, BLOCK_SIZE, TILE)
            key = tile * TILE + tl.arange(0, TILE)
            seen = (key >= first_key) & (key < cached_len)
            acc, peak, total = attend(
                q_tile, k, v, seen[None, :], acc, peak, total, scale_log2, True, softcap_log2,
                slope, context_len - 1, tile * TILE,
            )  # fmt: skip
    else:
        q_exact = as_exact(q_tile, kv)
        if cascade_of is not None or sinks is not None:
            peak -= HEADROOM
            total *= 2**HEADROOM
            acc *= 2**HEADROOM
        even, odd = split_dims(acc)
        for tile in range(begin, end):
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
                q_exact, k, v, scales, seen[None, :], even, odd, peak, total, scale_log2, softcap_log2,
                slope, context_len - 1, tile * TILE,
            )  # fmt: skip
        acc = tl.interleave(even, odd)

    acc = acc / total[:, None]  # every split saw a key
    if max_splits == 1:
        offset = (index.to(tl.int64) * num_q_heads + q_head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + offset, acc.to(out.dtype.element_ty), mask=q_mask)
    else:
        partial = (index.to(tl.int64) * max_splits + split) * num_q_heads + q_head
        tl.store(partials + partial[:, None] * HEAD_DIM + dim[None, :], acc, mask=q_mask)
        tl.store(lse + partial, peak + tl.log2(total), mask=lane < GROUP)
    if BESIDE:
        _end_after_the_kernel_ahead()
