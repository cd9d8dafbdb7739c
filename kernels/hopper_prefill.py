"""Prefill attention for Hopper: the copy engine fills tiles of keys while two warpgroups multiply others.

In Gluon, Triton's lower level. Two producers of one warp each have the copy engine (TMA) bring K and V, block
by block as the block table says, into stages of shared memory. Two consumers of four warps attend to them,
each for half of the program's queries, and multiply a tile's weights with V while they compute the next
tile's scores (after FlashAttention-3, Shah et al. 2024). Barriers in shared memory say which stage is full
and which one may be filled again.
"""

from __future__ import annotations

import torch
import triton
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

from kernels.launch import multiprocessors_of
from kernels.prefill_turns import work_after, work_of
from kernels.tile import LOG2_E, LOWEST

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # queries times heads of a consumer: what one wgmma takes
PANEL = gl.constexpr(64)  # 16-bit elements of a swizzled line of shared memory, 128 bytes
QUERIES = gl.constexpr(2)  # turns whose queries are in shared memory
MOST_STAGED = 256  # keys in shared memory at a time
# Turns of a program. On an H100 one, two, three bring 250, 302, 326 TFLOP/s at 32 × 512; 2 × 8192 are as
# quick with one to three, and up to a tenth slower with four.
MOST_TURNS = 3
LEAST_ROUNDS = 4  # programs for each multiprocessor: fewer, longer ones would end at very different times
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
def _place(count: gl.tensor, PLACES: gl.constexpr) -> gl.tuple:
    """Which of PLACES, a power of two, is seen to next after so many, and the phase of its barriers then."""
    return count & (PLACES - 1), (count & PLACES) // PLACES


@gluon.jit
def _attend(
    step: gl.tensor, num_tiles: gl.tensor, filled: gl.tensor, q: gl.shared_memory_descriptor,
    keys: gl.shared_memory_descriptor, values: gl.shared_memory_descriptor, barriers: gl.tuple,
    weights: gl.tensor, acc: gl.tensor, position: gl.tensor, peak: gl.tensor, total: gl.tensor,
    scale_log2: gl.tensor, MASKED: gl.constexpr, SCORES: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """The scores of a step's tile of keys, while the weights of the step before are multiplied with V.

    Stages have been filled `filled` times before the first step.
    """
    k_full, k_free, v_full, v_free = barriers
    stage, phase = _place(filled + step, STAGES)
    before, v_phase = _place(filled + step - 1, STAGES)
    mbarrier.wait(k_full.index(stage), phase)
    nothing = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    scores = warpgroup_mma(q, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), v_phase)
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
    CONSUMER: gl.constexpr, TILE: gl.constexpr, DIM: gl.constexpr,
) -> None:  # fmt: skip
    """Zero V [TILE, DIM] from the context's end on: what is there may be NaN, and NaN times zero is too."""
    HALF: gl.constexpr = TILE // 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    key = first_key + CONSUMER * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    mine = v.slice(CONSUMER * HALF, HALF)
    mine.store(gl.where((key < context_len)[:, None], mine.load(LAYOUT), 0.0))
    fence_async_shared()


@gluon.jit
def _uniform(value: gl.tensor) -> gl.tensor:
    """A scalar that all threads hold, so that the assembler sees they do, and computes with it once a warp.

    Places of barriers and tiles otherwise take 0.1 µs of each step.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r", [value],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _consume(
    out: gl.tensor, shared: gl.tuple, todo: gl.tuple, num_kv_heads: gl.tensor, scale_log2: gl.tensor,
    CONSUMER: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Attention of ROWS // GROUP queries of each turn, for all heads of one kv head; last keys first."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    # A row's elements next to each other, to be written 16 bytes at a time.
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS // GROUP
    queries, keys, values, barriers, q_full, q_free, cleared = shared
    k_full, k_free, v_full, v_free = barriers
    work, plan, turns = todo
    row, query_start, query_len, first_query, context_len, num_tiles = work
    lane = CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))[:, None]
    query = lane // GROUP
    dim = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))[None, :]
    offset = (query * (num_kv_heads * GROUP) + lane % GROUP) * DIM + dim
    # So many times stages, queries and values past a context have been seen to.
    filled, asked, clearings = 0, 0, 0
    for turn in range(turns[0], turns[1]):
        filled, num_tiles = _uniform(filled), _uniform(num_tiles)
        if num_tiles > 0:
            q_place, q_phase = _place(asked, QUERIES)
            q = queries.index(q_place * CONSUMERS + CONSUMER)
            first_position = context_len - query_len + first_query
            position = first_position + (CONSUMER * ROWS + gl.arange(0, ROWS, ROW)) // GROUP
            peak = gl.full([ROWS], LOWEST, gl.float32, ROW)
            total = gl.zeros([ROWS], gl.float32, ROW)
            acc = gl.zeros([ROWS, DIM], gl.float32, RESULT)

            stage, phase = _place(filled, STAGES)
            mbarrier.wait(q_full.index(q_place), q_phase)
            mbarrier.wait(k_full.index(stage), phase)
            nothing = gl.zeros([ROWS, TILE], gl.float32, SCORES)
            k = keys.index(stage).permute((1, 0))
            scores = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(k_free.index(stage))
            last_tile = (num_tiles - 1) * TILE
            weights, peak, total, _ = _softmax(
                scores, last_tile, position, peak, total, scale_log2, True, TILE
            )
            weights = gl.convert_layout(weights.to(out.dtype.element_ty), WEIGHTS)
            if last_tile + TILE > context_len:
                mbarrier.wait(v_full.index(stage), phase)
                _clear_past(context_len, last_tile, values.index(stage), CONSUMER, TILE, DIM)
                mbarrier.arrive(cleared)
                mbarrier.wait(cleared, clearings & 1)
                clearings += 1

            # All queries see all keys up to the first position's: tiles that need no mask.
            masked_tiles = gl.maximum(num_tiles - gl.maximum(first_position + 1, 0) // TILE, 1)
            for step in range(1, masked_tiles):
                weights, acc, peak, total = _attend(
                    step, num_tiles, filled, q, keys, values, barriers, weights, acc, position, peak, total,
                    scale_log2, True, SCORES, TILE, STAGES,
                )  # fmt: skip
            for step in range(masked_tiles, num_tiles):
                weights, acc, peak, total = _attend(
                    step, num_tiles, filled, q, keys, values, barriers, weights, acc, position, peak, total,
                    scale_log2, False, SCORES, TILE, STAGES,
                )  # fmt: skip
            mbarrier.arrive(q_free.index(q_place))
            filled += num_tiles
            asked += 1
            stage, phase = _place(filled - 1, STAGES)
            mbarrier.wait(v_full.index(stage), phase)
            acc = warpgroup_mma(weights, values.index(stage), acc, is_async=True)
            first = (query_start + first_query) * num_kv_heads + gl.program_id(0)
            into = out + first.to(gl.int64) * (GROUP * DIM) + offset
            inside = query < query_len - first_query
            acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
            mbarrier.arrive(v_free.index(stage))

            total = 1.0 / gl.where(total == 0.0, 1.0, total)
            acc *= gl.convert_layout(total, gl.SliceLayout(1, RESULT))[:, None]
            result = gl.convert_layout(acc.to(out.dtype.element_ty), WIDE)
            gl.store(into, result, mask=inside)
        work = (row, query_start, query_len, first_query, context_len, num_tiles)
        row, query_start, query_len, first_query, context_len, num_tiles = work_after(
            turn, turns[1], work, plan, BLOCK_Q, TILE, 4
        )


@gluon.jit
def _ask_for_queries(
    source: tma.tensor_descriptor, panels: gl.shared_memory_descriptor, place: gl.tensor,
    full: gl.shared_memory_descriptor, first_token: gl.tensor, GROUP: gl.constexpr, DIM: gl.constexpr,
) -> None:  # fmt: skip
    PANELS: gl.constexpr = DIM // PANEL
    mbarrier.expect(full, CONSUMERS * ROWS * DIM * 2)
    for half in gl.static_range(CONSUMERS):
        for panel in gl.static_range(PANELS):
            token = first_token + half * (ROWS // GROUP)
            into = panels.index((place * CONSUMERS + half) * PANELS + panel)
            box = [token, gl.program_id(0) * GROUP, panel * PANEL]
            tma.async_copy_global_to_shared(source, box, full, into)


@gluon.jit
def _produce(
    queries: gl.tuple, source: gl.tuple, stages: gl.tuple, todo: gl.tuple, first_row: gl.tensor,
    OF_KEYS: gl.constexpr,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Fill the stages of K or of V in turn, with as many boxes as a tile has blocks; before K, queries."""
    kv_source, block_tables, table_stride, block_rows = source
    boxes, full, free = stages
    q_source, q_panels, q_full, q_free = queries
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE else TILE
    BOXES: gl.constexpr = TILE // BOX
    PANELS: gl.constexpr = DIM // PANEL
    work, plan, turns = todo
    row, query_start, query_len, first_query, context_len, num_tiles = work
    filled, asked = 0, 0
    for turn in range(turns[0], turns[1]):
        filled, num_tiles = _uniform(filled), _uniform(num_tiles)
        table = block_tables + row.to(gl.int64) * table_stride
        last_key = gl.maximum(context_len - 1, 0)
        if OF_KEYS and num_tiles > 0:
            place, phase = _place(asked, QUERIES)
            mbarrier.wait(q_free.index(place), phase ^ 1)
            _ask_for_queries(
                q_source, q_panels, place, q_full.index(place), query_start + first_query, GROUP, DIM
            )
            asked += 1
        for step in range(num_tiles):
            stage, phase = _place(filled + step, STAGES)
            found: gl.tuple = ()
            for box in gl.static_range(BOXES):
                # Past the context any block of it will do.
                key = gl.minimum((num_tiles - 1 - step) * TILE + box * BOX, last_key)
                block = gl.load(table + key // BLOCK_SIZE)
                found += (block * block_rows + first_row + key % BLOCK_SIZE // BOX * BOX,)
            mbarrier.wait(free.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), TILE * DIM * 2)
            for box in gl.static_range(BOXES):
                for panel in gl.static_range(PANELS):
                    into = boxes.index((stage * PANELS + panel) * BOXES + box)
                    place_in_cache = [found[box], panel * PANEL]
                    tma.async_copy_global_to_shared(kv_source, place_in_cache, full.index(stage), into)
        filled += num_tiles
        work = (row, query_start, query_len, first_query, context_len, num_tiles)
        row, query_start, query_len, first_query, context_len, num_tiles = work_after(
            turn, turns[1], work, plan, CONSUMERS * ROWS // GROUP, TILE, 1
        )


@gluon.jit(do_not_specialize=["num_sequences", "turns", "turns_each"])
def _kernel(
    out: gl.tensor, q_source: tma.tensor_descriptor, kv_source: tma.tensor_descriptor,
    block_tables: gl.tensor, rows: gl.tensor, query_starts: gl.tensor, context_lens: gl.tensor,
    num_sequences: gl.tensor, turns: gl.tensor, turns_each: gl.tensor, num_kv_heads: gl.tensor,
    scale_log2: gl.tensor, table_stride: gl.tensor, block_rows: gl.tensor, part_rows: gl.tensor,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """For all query heads of one kv head, `turns_each` of the `turns` of CONSUMERS * ROWS // GROUP queries.

    While the last keys of a turn are attended to, the first ones of the next are on their way.
    """
    # Decode attention may run beside the last programs: it relies on this kernel having begun only when all
    # before it had ended, so do not launch this one dependently.
    gdc_launch_dependents()
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS // GROUP
    first_turn = gl.program_id(1) * turns_each
    last_turn = gl.minimum(first_turn + turns_each, turns)
    plan = (rows, query_starts, context_lens, num_sequences, turns)
    work = work_of(first_turn, plan, BLOCK_Q, TILE, 4)
    if (work[5] == 0) & (last_turn - first_turn == 1):
        return

    # A tile of shared memory is panels of PANEL columns with all rows each, in which boxes follow each other.
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE else TILE
    PANELS: gl.constexpr = DIM // PANEL
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    SHARED_Q: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = out.dtype.element_ty
    boxes: gl.constexpr = [STAGES * PANELS * (TILE // BOX), BOX, PANEL]
    panels: gl.constexpr = [QUERIES * CONSUMERS * PANELS, ROWS // GROUP, GROUP, PANEL]
    q_panels = gl.allocate_shared_memory(dtype, panels, SHARED_Q)
    k_boxes = gl.allocate_shared_memory(dtype, boxes, SHARED)
    v_boxes = gl.allocate_shared_memory(dtype, boxes, SHARED)
    queries = q_panels._reinterpret(dtype, [QUERIES * CONSUMERS, ROWS, DIM], SHARED)
    keys = k_boxes._reinterpret(dtype, [STAGES, TILE, DIM], SHARED)
    values = v_boxes._reinterpret(dtype, [STAGES, TILE, DIM], SHARED)

    q_full = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], BARRIER)
    cleared = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for place in gl.static_range(QUERIES):
        mbarrier.init(q_full.index(place), 1)
        mbarrier.init(q_free.index(place), CONSUMERS)
    mbarrier.init(cleared, CONSUMERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), 1)
        mbarrier.init(k_free.index(stage), CONSUMERS)
        mbarrier.init(v_full.index(stage), 1)
        mbarrier.init(v_free.index(stage), CONSUMERS)
    fence_async_shared()
    barriers = (k_full, k_free, v_full, v_free)
    between = (first_turn, last_turn)
    read = (queries, keys, values, barriers, q_full, q_free, cleared)
    asked = (q_source, q_panels, q_full, q_free)
    source = (kv_source, block_tables, table_stride, block_rows)
    k_stages, v_stages = (k_boxes, k_full, k_free), (v_boxes, v_full, v_free)
    k_row = gl.program_id(0) * BLOCK_SIZE
    v_row = k_row + part_rows
    todo = (work, plan, between)
    gl.warp_specialize(
        [
            (_consume, (out, read, todo, num_kv_heads, scale_log2, 0, GROUP, DIM, TILE, STAGES)),
            (_consume, (out, read, todo, num_kv_heads, scale_log2, 1, GROUP, DIM, TILE, STAGES)),
            (_produce, (asked, source, k_stages, todo, k_row, True, GROUP, BLOCK_SIZE, DIM, TILE, STAGES)),
            (_produce, (asked, source, v_stages, todo, v_row, False, GROUP, BLOCK_SIZE, DIM, TILE, STAGES)),
        ],
        worker_num_warps=[4, 1, 1],
        worker_num_regs=[232, 32, 32],  # as many as keep all variants from spilling
    )


def turns_of_a_program(turns: int, multiprocessors: int) -> int:
    """As many as leave programs enough for each multiprocessor."""
    return max(min(turns // (multiprocessors * LEAST_ROUNDS), MOST_TURNS), 1)


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
    turns = num_tokens // block_q + num_sequences
    turns_each = turns_of_a_program(num_kv_heads * turns, multiprocessors_of(q.device))
    _kernel[num_kv_heads, triton.cdiv(turns, turns_each)](
        out, q_source, kv_source, block_tables, rows, query_starts, context_lens, num_sequences, turns,
        turns_each, num_kv_heads,
        scale * LOG2_E, block_tables.stride(0), rows_a_block, kv.stride(1) // head_dim,
        GROUP=group, BLOCK_SIZE=block_size, DIM=head_dim, TILE=tile, STAGES=MOST_STAGED // tile, num_warps=4,
    )  # fmt: skip
