"""The kernel of `attention.hopper_decode.decode`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.attention.hopper_decode.division import divide, part_of_group, part_of_program
from quire.kernels.attention.hopper_decode.newest import normed_key, rotated, store_planes
from quire.kernels.attention.hopper_decode.parts import (
    both_parts,
    merged_parts,
    no_parts,
    prefix_parts,
    with_part,
)
from quire.kernels.attention.hopper_decode.products import (
    LANES,
    as_operands,
    merged_sums,
    no_values,
    scores_of,
    values_of,
    with_values,
)
from quire.kernels.attention.hopper_decode.tiles import (
    WARPS,
    WIDEST,
    allocate_stages,
    ask_for_tile,
    bring_tile,
    find_keys,
)
from quire.kernels.attention.kv_tile import LOWEST
from quire.kernels.pointwise.norm import times_weight

# Before kernels ahead have ended, see `kernels.launch`. Of the cache only what READY says; q only BESIDE a
# prefill, which leaves it alone.
READS_EARLY = frozenset(
    (
        *("block_tables", "rows", "context_lens", "order", "cascade_of", "shared_lens"),
        *("rope", "q_norm", "k_norm", "q", "kv", "kv_scales"),
    )
)


@gluon.jit
def _end_after_the_kernel_ahead() -> None:
    """Do the same as in `attention.decode_kernel`."""
    ends = gl.program_id(0) == gl.num_programs(0) - 1
    if ends & (gl.program_id(1) == gl.num_programs(1) - 1):
        gdc_wait()


@gluon.jit(do_not_specialize=["window", "long_rows", "long_splits", "undivided", "left_splits", "max_splits"])
def decode_kernel(
    out: gl.tensor, partials: gl.tensor, lse: gl.tensor, arrivals: gl.tensor, q: gl.tensor, kv: gl.tensor,
    block_tables: gl.tensor, rows: gl.tensor, context_lens: gl.tensor, order: gl.tensor,
    cascade_of: gl.tensor, shared_lens: gl.tensor, prefix_partials: gl.tensor, prefix_lse: gl.tensor,
    long_rows: gl.tensor, long_splits: gl.tensor, undivided: gl.tensor, left_splits: gl.tensor,
    max_splits: gl.tensor, scale_log2: gl.tensor, window: gl.tensor,
    q_stride: gl.tensor, table_stride: gl.tensor, block_stride: gl.tensor, part_stride: gl.tensor,
    head_stride: gl.tensor, kv_scales: gl.tensor, scale_block_stride: gl.tensor, scale_head_stride: gl.tensor,
    rope: gl.tensor, q_norm: gl.tensor, k_norm: gl.tensor, eps: gl.tensor,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, PLANES: gl.constexpr, NEW: gl.constexpr, READY: gl.constexpr,
    BESIDE: gl.constexpr, MERGES: gl.constexpr, SPARING: gl.constexpr, BRINGS: gl.constexpr,
) -> None:  # fmt: skip
    """Attend as `attention.decode_kernel`: one split of a row's context for one kv head.

    Of a group of more heads than LANES each program has a part. Heads are held as ones of DIM, with zeros
    from HEAD_DIM on.
    MERGES: only some rows are split (see `divide`), and the last program of one to be done merges its parts:
    `arrivals`, by row and kv head, counts them, and is zero before and after. Otherwise all rows' results are
    left as parts. Either way there is room for `max_splits` parts of each row.
    READY: before the kernel ahead began the cache held nothing that is read here (0), all but the newest
    token (1) or all (2). BRINGS: the tile after the staged ones is brought to the L2 cache meanwhile.
    """
    # The next kernel begins once all programs have let it, and finds its first keys or weights while the last
    # ones here are at work: were these to find theirs before, 34 rows of 1,024 keys would take 2 % longer.
    gdc_launch_dependents()
    KEYS: gl.constexpr = TILE // WARPS
    PROGRAMS: gl.constexpr = (GROUP + LANES - 1) // LANES  # of a group
    # Whether a program has as many heads as lanes, and none is left for the newest key.
    APART: gl.constexpr = (GROUP + PROGRAMS - 1) // PROGRAMS == LANES
    kv_head = gl.program_id(0)
    if PROGRAMS == 1:
        own: gl.constexpr = GROUP
    else:
        kv_head, before, own = part_of_group(kv_head, GROUP, PROGRAMS)
    place, split, parts = part_of_program(gl.program_id(1), long_rows, long_splits, undivided, left_splits)
    index = gl.load(order + place)
    context_len = gl.load(context_lens + index)
    SHARED: gl.constexpr = cascade_of is not None
    gl.static_assert(not (NEW and SHARED))
    shared_len = 0
    if SHARED:
        cascade = gl.load(cascade_of + index)
        shared_len = gl.load(shared_lens + cascade, mask=cascade >= 0, other=0)
    first_key, first_tile, tiles, split_tiles, splits = divide(
        context_len,
        shared_len,
        window,
        order,
        context_lens,
        place,
        parts,
        long_rows,
        undivided,
        TILE,
        MERGES,
        SPARING,
    )
    if split >= gl.maximum(splits, 1):  # a row's first split waits for the kernels ahead, so this need not
        if BESIDE:
            _end_after_the_kernel_ahead()
        return
    begin = first_tile + split * split_tiles
    count = gl.minimum(split_tiles, first_tile + tiles - begin)
    last_key = context_len - 1
    cached_len = last_key if NEW else context_len
    table = block_tables + gl.load(rows + index).to(gl.int64) * table_stride
    kv += kv_head * head_stride
    if PLANES:
        kv_scales += kv_head * scale_head_stride

    dtype: gl.constexpr = q.dtype.element_ty
    gl.static_assert(not PLANES or DIM == HEAD_DIM)
    # Of a piece that is multiplied at once, in 16 bits; and from one key to the next, in the cache.
    PIECES: gl.constexpr = 4 if PLANES else 2 if DIM > WIDEST else 1
    WIDTH: gl.constexpr = DIM // PIECES
    PITCH: gl.constexpr = DIM // 4 if PLANES else HEAD_DIM
    # Keys and values are then asked for one after the other, each as soon as what they replace is read.
    HALVED: gl.constexpr = PIECES == 2
    GROUPS: gl.constexpr = 2 if HALVED else 1  # of copies, for a tile
    TILES: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // WIDTH, WIDTH // 8], [WARPS, 1, 1], [2, 1, 0])
    stages = allocate_stages(dtype, STAGES, KEYS, DIM, PIECES)
    strides = (block_stride, scale_block_stride)
    found: gl.tuple = ()
    for stage in gl.static_range(STAGES):
        found += (find_keys(table, begin + stage, last_key, strides, TILES, BLOCK_SIZE, TILE, PITCH),)
    filled = gl.minimum(count, last_key // TILE - begin)  # tiles before the newest token's
    # Tiles that may be read before the kernel ahead has ended; copies that a mask left out would write zeros.
    old = filled if READY == 1 else count
    if READY > 0:
        for stage in gl.static_range(STAGES):
            for group in gl.static_range(GROUPS):
                if stage < old:
                    ask_for_tile(
                        kv, kv_scales, stages, stage, found[stage], begin + stage, cached_len, part_stride,
                        TILES, KEYS, WIDTH, PITCH, BLOCK_SIZE, PLANES, group if HALVED else None,
                    )  # fmt: skip
                async_copy.commit_group()
    if BRINGS and filled > STAGES:
        bring_tile(
            kv, table, begin + STAGES, last_key, strides, part_stride, BLOCK_SIZE, TILE,
            WIDTH if PLANES else DIM, PITCH, PLANES,
        )  # fmt: skip

    SCORES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    ROW: gl.constexpr = gl.SliceLayout(2, SCORES)
    # A thread has all warps' shares of its elements, to add them up without the others.
    MERGED: gl.constexpr = gl.BlockedLayout(
        [WARPS, 1, 8], [1, 256 // DIM, DIM // 8], [1, WARPS, 1], [2, 1, 0]
    )
    LOADED: gl.constexpr = gl.SliceLayout(0, MERGED)
    lane = gl.arange(0, LANES, gl.SliceLayout(1, LOADED))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, LOADED))
    real = dim < HEAD_DIM
    # For whole heads the same machine code as loads without a mask have, which zeros would reorder.
    LACKED: gl.constexpr = None if DIM == HEAD_DIM else 0.0
    num_kv_heads = gl.num_programs(0)
    q_head = kv_head * GROUP + lane
    if PROGRAMS > 1:
        num_kv_heads //= PROGRAMS
        q_head += before
    head = gl.where(lane < own, q_head, num_kv_heads * GROUP + kv_head)
    first_half = dim < HEAD_DIM // 2
    other = gl.where(first_half, dim + HEAD_DIM // 2, dim - HEAD_DIM // 2)
    if NEW:
        if q_norm is not None:
            is_q = (lane < own)[:, None]
            q_weight, k_weight = gl.load(q_norm + dim, real, LACKED), gl.load(k_norm + dim, real, LACKED)
            weight = gl.where(is_q, q_weight[None, :], k_weight[None, :])
            q_other = gl.load(q_norm + other, real, LACKED)
            k_other_weight = gl.load(k_norm + other, real, LACKED)
            other_weight = gl.where(is_q, q_other[None, :], k_other_weight[None, :])
        if rope is not None:
            angle = rope + gl.maximum(cached_len, 0).to(gl.int64) * HEAD_DIM + gl.minimum(dim, other)
            cos = gl.load(angle, real, LACKED)
            sin = gl.load(angle + HEAD_DIM // 2, real, LACKED)
            sin = gl.where(first_half, -sin, sin)
        block = gl.load(table + cached_len // BLOCK_SIZE).to(gl.int64)
    if not BESIDE:
        gdc_wait()  # from here on what earlier kernels wrote may be read, and their inputs written
    if splits == 0:  # the context is empty
        if BESIDE:
            _end_after_the_kernel_ahead()
        return
    if READY < 2:
        for stage in gl.static_range(STAGES):
            for group in gl.static_range(GROUPS):
                if (READY == 0 or stage >= old) and stage < count:
                    ask_for_tile(
                        kv, kv_scales, stages, stage, found[stage], begin + stage, cached_len, part_stride,
                        TILES, KEYS, WIDTH, PITCH, BLOCK_SIZE, PLANES, group if HALVED else None,
                    )  # fmt: skip
                async_copy.commit_group()

    token = q + index.to(gl.int64) * q_stride
    inside = (lane <= own if NEW and not APART else lane < own)[:, None] & real[None, :]
    heads = gl.load(token + head[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
    last = split == splits - 1
    # What comes to what the keys of this split give in the end: the newest token, or the shared prefix.
    more = no_parts(DIM, LOADED)
    score = gl.full([LANES], float("-inf"), gl.float32, gl.SliceLayout(1, LOADED))
    if SHARED and not HALVED:
        spread = (index, q_head, lane < own, num_kv_heads * GROUP)
        more = prefix_parts(prefix_partials, prefix_lse, shared_len, spread, dim, HEAD_DIM, DIM, LOADED)
    if NEW:
        heads_other = gl.load(token + head[:, None] * HEAD_DIM + other[None, :], mask=inside, other=0.0)
        v_place = token + ((GROUP + 1) * num_kv_heads + kv_head) * HEAD_DIM
        new_v = gl.load(v_place + dim, mask=real, other=0.0).to(gl.float32)
        if q_norm is not None:  # rounded where `attention.write_kv` rounds
            wide = heads.to(gl.float32)
            norm = gl.rsqrt(gl.sum(wide * wide, 1) / HEAD_DIM + eps)[:, None]
            WIDE: gl.constexpr = q_norm.dtype.element_ty == gl.float32
            heads = times_weight(wide * norm, weight.to(gl.float32), dtype, WIDE)
            heads_other = times_weight(
                heads_other.to(gl.float32) * norm, other_weight.to(gl.float32), dtype, WIDE
            )
        if rope is not None:
            heads = rotated(heads, heads_other, cos[None, :], sin[None, :])
        if APART:
            place = token + (GROUP * num_kv_heads + kv_head) * HEAD_DIM
            new_k = gl.load(place + dim, mask=real, other=0.0)
            k_other = gl.load(place + other, mask=real, other=0.0)
            if q_norm is not None:
                new_k, k_other = normed_key(new_k, k_other, k_weight, k_other_weight, eps, HEAD_DIM)
            if rope is not None:
                new_k = rotated(new_k, k_other, cos, sin)
            new_k = new_k.to(gl.float32)
        else:
            new_k = gl.sum(gl.where((lane == own)[:, None], heads.to(gl.float32), 0.0), 0)
        if last:
            slot = kv + (block * block_stride + cached_len % BLOCK_SIZE * PITCH)
            if PLANES:
                word = kv_scales + (block * scale_block_stride + cached_len % BLOCK_SIZE)
                new_k, new_v = store_planes(slot, part_stride, word, new_k, new_v, dim, BLOCK_SIZE)
            else:
                gl.store(slot + dim, new_k.to(dtype), real)
                gl.store(slot + part_stride + dim, new_v.to(dtype), real)
            score = gl.sum(heads.to(gl.float32) * new_k[None, :], 1) * scale_log2
            if not HALVED:
                more = with_part(more, score, new_v[None, :])
    peak = gl.full([WARPS, LANES], LOWEST, gl.float32, ROW)
    total = gl.zeros([WARPS, LANES], gl.float32, ROW)
    sums = no_values(DIM, SCORES, PIECES)
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    queries = as_operands(heads, SCORES, QUERIES, MERGED, PIECES)

    K: gl.constexpr = gl.DotOperandLayout(1, SCORES, 2)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, ROW))[:, None, None]
    key = warp * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(1, SCORES)))[None, None, :]
    ahead = find_keys(table, begin + STAGES, last_key, strides, TILES, BLOCK_SIZE, TILE, PITCH)
    for step in range(count):
        now = step % STAGES
        tile_key = (begin + step) * TILE
        async_copy.wait_group(GROUPS * STAGES - 1)
        scores = scores_of(queries, stages, now, KEYS, SCORES, QUERIES, K, PIECES)
        values = values_of(stages, now, SCORES, K, PIECES)
        if step + STAGES < count:
            ask_for_tile(
                kv, kv_scales, stages, now, ahead, begin + step + STAGES, cached_len, part_stride,
                TILES, KEYS, WIDTH, PITCH, BLOCK_SIZE, PLANES, 0 if HALVED else None,
            )  # fmt: skip
        async_copy.commit_group()
        after = begin + step + 1 + STAGES
        if not HALVED:
            ahead = find_keys(table, after, last_key, strides, TILES, BLOCK_SIZE, TILE, PITCH)
        seen = (tile_key + key >= first_key) & (tile_key + key < cached_len)
        scores = gl.where(seen, scores * scale_log2, float("-inf"))
        new_peak = gl.maximum(peak, gl.max(scores, 2))
        weights = gl.exp2(scores - new_peak[:, :, None])
        decay = gl.exp2(peak - new_peak)
        total = total * decay + gl.sum(weights, 2)
        peak = new_peak
        if HALVED:  # as many groups on their way as before, of which the values are the oldest now
            async_copy.wait_group(GROUPS * STAGES - 1)
        sums = with_values(sums, decay[:, :, None], weights, values, dtype, QUERIES, K, PIECES)
        if HALVED:
            if step + STAGES < count:
                ask_for_tile(
                    kv, kv_scales, stages, now, ahead, begin + step + STAGES, cached_len, part_stride,
                    TILES, KEYS, WIDTH, PITCH, BLOCK_SIZE, PLANES, 1,
                )  # fmt: skip
            async_copy.commit_group()
            ahead = find_keys(table, after, last_key, strides, TILES, BLOCK_SIZE, TILE, PITCH)

    peak = gl.convert_layout(peak, gl.SliceLayout(2, MERGED))
    total = gl.convert_layout(total, gl.SliceLayout(2, MERGED))
    highest = gl.max(peak, 0)
    share = gl.exp2(peak - highest[None, :])
    result = merged_sums(sums, share, MERGED, PIECES)
    whole = gl.convert_layout(gl.sum(total * share, 0), gl.SliceLayout(1, LOADED))
    highest = gl.convert_layout(highest, gl.SliceLayout(1, LOADED))
    if HALVED:  # only now, for want of registers
        if SHARED:
            spread = (index, q_head, lane < own, num_kv_heads * GROUP)
            more = prefix_parts(prefix_partials, prefix_lse, shared_len, spread, dim, HEAD_DIM, DIM, LOADED)
        if NEW:
            more = with_part(more, score, new_v[None, :])
    if NEW or SHARED:
        highest, whole, result = both_parts((highest, whole, result), more)
    result /= whole[:, None]
    held = (lane < own)[:, None] & real[None, :]
    row_heads = num_kv_heads * GROUP
    token_heads = (index.to(gl.int64) * row_heads + q_head)[:, None] * HEAD_DIM + dim[None, :]
    if MERGES and splits == 1:
        gl.store(out + token_heads, result.to(out.dtype.element_ty), mask=held)
    else:
        first = index.to(gl.int64) * max_splits * row_heads + q_head
        partial = first + split * row_heads
        gl.store(partials + partial[:, None] * HEAD_DIM + dim[None, :], result, mask=held)
        gl.store(lse + partial, highest + gl.log2(whole), mask=lane < own)
        if MERGES:
            debug_barrier()  # all threads have stored
            arrivals += index * gl.num_programs(0) + gl.program_id(0)
            if gl.atomic_add(arrivals, 1) == splits - 1:
                gl.store(arrivals, 0)
                result = merged_parts(
                    partials, lse, first, row_heads, splits, lane < own, dim, HEAD_DIM, DIM, LOADED
                )
                gl.store(out + token_heads, result.to(out.dtype.element_ty), mask=held)
    if BESIDE:
        _end_after_the_kernel_ahead()
