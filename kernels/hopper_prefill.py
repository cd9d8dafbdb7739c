"""Prefill attention for Hopper: the copy engine fills tiles of keys while two warpgroups multiply others.

In Gluon, Triton's lower level. Two producers of one warp each have the copy engine (TMA) bring K and V, block
by block as the block table says, into stages of shared memory. Two consumers of four warps attend to them,
each for half of the program's queries, and multiply a tile's weights with V while they compute the next
tile's scores (after FlashAttention-3, Shah et al. 2024). Barriers in shared memory say which stage is full
and which one may be filled again.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.tile import LOG2_E, LOWEST

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # queries times heads of a consumer: what one wgmma takes
PANEL = gl.constexpr(64)  # 16-bit elements of a swizzled line of shared memory, 128 bytes
MOST_STAGED = 256  # keys in shared memory at a time
SHORT = 1024  # queries up to which half a tile of keys wastes less than it costs


@gluon.jit
def _softmax(
    scores: gl.tensor, first_key: gl.tensor, position: gl.tensor, peak: gl.tensor, total: gl.tensor,
    scale_log2: gl.tensor, MASKED: gl.constexpr, TILE: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """One step of online softmax in base 2: weights, new peak, new total, and the decay of what is summed."""
    if MASKED:
        key = first_key + gl.arange(0, TILE, layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_peak[:, None])
    decay = gl.exp2(peak - new_peak)
    return weights, new_peak, total * decay + gl.sum(weights, 1), decay


@gluon.jit
def _attend(
    step: gl.tensor, num_tiles: gl.tensor, q: gl.shared_memory_descriptor,
    keys: gl.shared_memory_descriptor, values: gl.shared_memory_descriptor, barriers: gl.tuple,
    weights: gl.tensor, acc: gl.tensor, position: gl.tensor, peak: gl.tensor, total: gl.tensor,
    scale_log2: gl.tensor, MASKED: gl.constexpr, SCORES: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """The scores of a step's tile of keys, while the weights of the step before are multiplied with V."""
    k_full, k_free, v_full, v_free = barriers
    stage, before = step % STAGES, (step - 1) % STAGES
    mbarrier.wait(k_full.index(stage), step // STAGES & 1)
    nothing = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    scores = warpgroup_mma(q, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), (step - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, values.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_free.index(stage))
    first_key = (num_tiles - 1 - step) * TILE
    new_weights, peak, total, decay = _softmax(
        scores, first_key, position, peak, total, scale_log2, MASKED, TILE
    )
    new_weights = gl.convert_layout(new_weights.to(weights.dtype), weights.type.layout)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    mbarrier.arrive(v_free.index(before))
    acc *= gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    return new_weights, acc, peak, total


@gluon.jit
def _clear_past(
    context_len: gl.tensor, first_key: gl.tensor, v: gl.shared_memory_descriptor,
    cleared: gl.shared_memory_descriptor, CONSUMER: gl.constexpr, TILE: gl.constexpr, DIM: gl.constexpr,
) -> None:  # fmt: skip
    """Zero V [TILE, DIM] from the context's end on: what is there may be NaN, and NaN times zero is too."""
    HALF: gl.constexpr = TILE // 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    key = first_key + CONSUMER * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    mine = v.slice(CONSUMER * HALF, HALF)
    mine.store(gl.where((key < context_len)[:, None], mine.load(LAYOUT), 0.0))
    fence_async_shared()
    mbarrier.arrive(cleared)
    mbarrier.wait(cleared, 0)


@gluon.jit
def _consume(
    out: gl.tensor, shared: gl.tuple, work: gl.tuple, num_kv_heads: gl.tensor, scale_log2: gl.tensor,
    CONSUMER: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Attention of ROWS // GROUP consecutive queries, for all query heads of one kv head; last keys first."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    queries, keys, values, barriers, q_full, cleared = shared
    k_full, k_free, v_full, _ = barriers
    query_start, query_len, first_query, context_len, num_tiles = work
    q = queries.index(CONSUMER)
    first_position = context_len - query_len + first_query
    position = first_position + (CONSUMER * ROWS + gl.arange(0, ROWS, ROW)) // GROUP
    peak = gl.full([ROWS], LOWEST, gl.float32, ROW)
    total = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, DIM], gl.float32, RESULT)

    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    nothing = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    scores = warpgroup_mma(q, keys.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_free.index(0))
    last_tile = (num_tiles - 1) * TILE
    weights, peak, total, _ = _softmax(scores, last_tile, position, peak, total, scale_log2, True, TILE)
    weights = gl.convert_layout(weights.to(out.dtype.element_ty), WEIGHTS)
    if last_tile + TILE > context_len:
        mbarrier.wait(v_full.index(0), 0)
        _clear_past(context_len, last_tile, values.index(0), cleared, CONSUMER, TILE, DIM)

    # All queries see all keys up to the first position's: tiles that need no mask.
    masked_tiles = gl.maximum(num_tiles - gl.maximum(first_position + 1, 0) // TILE, 1)
    for step in range(1, masked_tiles):
        weights, acc, peak, total = _attend(
            step, num_tiles, q, keys, values, barriers, weights, acc, position, peak, total, scale_log2,
            True, SCORES, TILE, STAGES,
        )  # fmt: skip
    for step in range(masked_tiles, num_tiles):
        weights, acc, peak, total = _attend(
            step, num_tiles, q, keys, values, barriers, weights, acc, position, peak, total, scale_log2,
            False, SCORES, TILE, STAGES,
        )  # fmt: skip
    stage = (num_tiles - 1) % STAGES
    mbarrier.wait(v_full.index(stage), (num_tiles - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, values.index(stage), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))

    total = gl.where(total == 0.0, 1.0, total)
    acc /= gl.convert_layout(total, gl.SliceLayout(1, RESULT))[:, None]
    # A row's elements next to each other, to be written 16 bytes at a time.
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    row = CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
    query = first_query + row // GROUP
    token = (query_start + query).to(gl.int64)
    offset = (token * num_kv_heads + gl.program_id(0)) * (GROUP * DIM) + row % GROUP * DIM
    result = gl.convert_layout(acc.to(out.dtype.element_ty), WIDE)
    gl.store(out + offset[:, None] + dim[None, :], result, mask=(query < query_len)[:, None])


@gluon.jit
def _ask_for_queries(
    source: tma.tensor_descriptor, panels: gl.shared_memory_descriptor, full: gl.shared_memory_descriptor,
    first_token: gl.tensor, GROUP: gl.constexpr, DIM: gl.constexpr,
) -> None:  # fmt: skip
    PANELS: gl.constexpr = DIM // PANEL
    mbarrier.expect(full, CONSUMERS * ROWS * DIM * 2)
    for half in gl.static_range(CONSUMERS):
        for panel in gl.static_range(PANELS):
            token = first_token + half * (ROWS // GROUP)
            into = panels.index(half * PANELS + panel)
            place = [token, gl.program_id(0) * GROUP, panel * PANEL]
            tma.async_copy_global_to_shared(source, place, full, into)


@gluon.jit
def _produce(
    queries: gl.tuple, source: gl.tuple, stages: gl.tuple, work: gl.tuple, first_row: gl.tensor,
    OF_KEYS: gl.constexpr,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Fill the stages of K or of V in turn, with as many boxes as a tile has blocks."""
    query_start, _, first_query, context_len, num_tiles = work
    kv_source, table, block_rows = source
    boxes, full, free = stages
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE else TILE
    BOXES: gl.constexpr = TILE // BOX
    PANELS: gl.constexpr = DIM // PANEL
    if OF_KEYS:
        q_source, q_panels, q_full = queries
        _ask_for_queries(q_source, q_panels, q_full, query_start + first_query, GROUP, DIM)
    last_key = gl.maximum(context_len - 1, 0)
    for step in range(num_tiles):
        stage = step % STAGES
        rows: gl.tuple = ()
        for box in gl.static_range(BOXES):
            # Past the context any block of it will do.
            key = gl.minimum((num_tiles - 1 - step) * TILE + box * BOX, last_key)
            row = gl.load(table + key // BLOCK_SIZE) * block_rows + first_row
            rows += (row + key % BLOCK_SIZE // BOX * BOX,)
        mbarrier.wait(free.index(stage), step // STAGES & 1 ^ 1)
        mbarrier.expect(full.index(stage), TILE * DIM * 2)
        for box in gl.static_range(BOXES):
            for panel in gl.static_range(PANELS):
                into = boxes.index((stage * PANELS + panel) * BOXES + box)
                place = [rows[box], panel * PANEL]
                tma.async_copy_global_to_shared(kv_source, place, full.index(stage), into)


@gluon.jit
def _find_sequence(
    query_starts: gl.tensor, num_sequences: gl.tensor, tile: gl.tensor, BLOCK_Q: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """The sequence of a query tile, and the tile's number within it: as in `kernels.prefill_attention`."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    begun = 0
    tile += gl.load(query_starts) // BLOCK_Q
    for first in range(0, num_sequences, 32):
        sequence = first + gl.arange(0, 32, LANES)
        starts = gl.load(query_starts + sequence, mask=sequence < num_sequences, other=0)
        begun += gl.sum(((starts // BLOCK_Q + sequence <= tile) & (sequence < num_sequences)).to(gl.int32), 0)
    return begun - 1, tile - (gl.load(query_starts + begun - 1) // BLOCK_Q + begun - 1)


@gluon.jit(do_not_specialize=["num_sequences"])
def _kernel(
    out: gl.tensor, q_source: tma.tensor_descriptor, kv_source: tma.tensor_descriptor,
    block_tables: gl.tensor, rows: gl.tensor, query_starts: gl.tensor, context_lens: gl.tensor,
    num_sequences: gl.tensor, num_kv_heads: gl.tensor, scale_log2: gl.tensor, table_stride: gl.tensor,
    block_rows: gl.tensor, part_rows: gl.tensor, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    DIM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """CONSUMERS * ROWS // GROUP consecutive queries of one sequence, for all query heads of one kv head."""
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS // GROUP
    # Decode attention may run beside the last programs: it relies on this kernel having begun only when all
    # before it had ended, so do not launch this one dependently.
    gdc_launch_dependents()
    # A sequence's later tiles see more keys: start the heavy ones first.
    sequence, query_tile = _find_sequence(
        query_starts, num_sequences, gl.num_programs(1) - 1 - gl.program_id(1), BLOCK_Q
    )
    query_start = gl.load(query_starts + sequence)
    query_len = gl.load(query_starts + sequence + 1) - query_start
    first_query = query_tile * BLOCK_Q
    if first_query >= query_len:
        return
    context_len = gl.load(context_lens + sequence)
    end = gl.minimum(context_len - query_len + first_query + BLOCK_Q, context_len)
    num_tiles = gl.maximum((end + TILE - 1) // TILE, 1)
    table = block_tables + gl.load(rows + sequence).to(gl.int64) * table_stride

    # A tile of shared memory is panels of PANEL columns with all rows each, in which boxes follow each other.
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE else TILE
    PANELS: gl.constexpr = DIM // PANEL
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    SHARED_Q: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = out.dtype.element_ty
    boxes: gl.constexpr = [STAGES * PANELS * (TILE // BOX), BOX, PANEL]
    q_panels = gl.allocate_shared_memory(dtype, [CONSUMERS * PANELS, ROWS // GROUP, GROUP, PANEL], SHARED_Q)
    k_boxes = gl.allocate_shared_memory(dtype, boxes, SHARED)
    v_boxes = gl.allocate_shared_memory(dtype, boxes, SHARED)
    queries = q_panels._reinterpret(dtype, [CONSUMERS, ROWS, DIM], SHARED)
    keys = k_boxes._reinterpret(dtype, [STAGES, TILE, DIM], SHARED)
    values = v_boxes._reinterpret(dtype, [STAGES, TILE, DIM], SHARED)

    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    cleared = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, 1)
    mbarrier.init(cleared, CONSUMERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), 1)
        mbarrier.init(k_free.index(stage), CONSUMERS)
        mbarrier.init(v_full.index(stage), 1)
        mbarrier.init(v_free.index(stage), CONSUMERS)
    fence_async_shared()
    barriers = (k_full, k_free, v_full, v_free)
    work = (query_start, query_len, first_query, context_len, num_tiles)
    read = (queries, keys, values, barriers, q_full, cleared)
    asked = (q_source, q_panels, q_full)
    source = (kv_source, table, block_rows)
    k_stages = (k_boxes, k_full, k_free)
    v_stages = (v_boxes, v_full, v_free)
    k_row = gl.program_id(0) * BLOCK_SIZE
    v_row = k_row + part_rows
    gl.warp_specialize(
        [
            (_consume, (out, read, work, num_kv_heads, scale_log2, 0, GROUP, DIM, TILE, STAGES)),
            (_consume, (out, read, work, num_kv_heads, scale_log2, 1, GROUP, DIM, TILE, STAGES)),
            (_produce, (asked, source, k_stages, work, k_row, True, GROUP, BLOCK_SIZE, DIM, TILE, STAGES)),
            (_produce, (asked, source, v_stages, work, v_row, False, GROUP, BLOCK_SIZE, DIM, TILE, STAGES)),
        ],
        worker_num_warps=[4, 1, 1],
        worker_num_regs=[240, 24, 24],
    )


def suits_hopper(q: torch.Tensor, kv: torch.Tensor, max_query_len: int) -> bool:
    """Whether `hopper_prefill` takes q [T, Hq, D] and kv [blocks, 2, Hkv, block_size, D] and is worth it.

    It wants Hopper's instructions, 16-bit numbers of one type, heads of 64 or 128 in groups of a power of
    two up to 64, and more queries than the narrowest tile of `kernels.prefill_attention` holds.
    """
    head_dim = q.shape[2]
    group = q.shape[1] // kv.shape[2]
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype == kv.dtype
        and q.element_size() == 2
        and head_dim in (64, 128)
        and group & (group - 1) == 0
        and max_query_len * group > ROWS.value
    )


def hopper_prefill(
    q: torch.Tensor,
    out: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
) -> None:
    """`kernels.prefill_attention.prefill_attention` without a window and scales, of what `suits_hopper`."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    group = num_q_heads // num_kv_heads
    tile = 64 if max_query_len <= SHORT else 128
    panel, rows_a_block = PANEL.value, kv.stride(0) // head_dim
    q_source = TensorDescriptor(
        q,
        [num_tokens, num_q_heads, head_dim],
        [q.stride(0), head_dim, 1],
        [ROWS.value // group, group, panel],
        gl.NVMMASharedLayout(128, 16, rank=3),
    )
    # The layer's part of the cache as rows of one head and token; what lies between is other layers'.
    kv_source = TensorDescriptor(
        kv,
        [(kv.shape[0] - 1) * rows_a_block + 2 * num_kv_heads * block_size, head_dim],
        [head_dim, 1],
        [min(block_size, tile), panel],
        gl.NVMMASharedLayout(128, 16, rank=2),
    )
    num_sequences = rows.shape[0]
    block_q = CONSUMERS.value * ROWS.value // group
    _kernel[num_kv_heads, num_tokens // block_q + num_sequences](
        out, q_source, kv_source, block_tables, rows, query_starts, context_lens, num_sequences, num_kv_heads,
        scale * LOG2_E, block_tables.stride(0), rows_a_block, kv.stride(1) // head_dim,
        GROUP=group, BLOCK_SIZE=block_size, DIM=head_dim, TILE=tile, STAGES=MOST_STAGED // tile, num_warps=4,
    )  # fmt: skip
