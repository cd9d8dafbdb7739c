"""The warps of `attention.hopper_prefill.prefill` that attend to keys.

They multiply a tile's weights with V while they compute the next tile's scores (after FlashAttention-3,
Shah et al. 2024).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.attention.hopper_prefill.pipeline import CONSUMERS, QUERIES, ROWS, place_of, uniform
from quire.kernels.attention.hopper_prefill.work_tiles import work_after
from quire.kernels.attention.kv_tile import LOWEST


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
    step: gl.tensor, num_tiles: gl.tensor, filled: gl.tensor, q: gl.shared_memory_descriptor,
    keys: gl.shared_memory_descriptor, values: gl.shared_memory_descriptor, barriers: gl.tuple,
    weights: gl.tensor, acc: gl.tensor, position: gl.tensor, peak: gl.tensor, total: gl.tensor,
    scale_log2: gl.tensor, MASKED: gl.constexpr, SCORES: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """Compute the scores of a tile of keys, while the weights of the step before are multiplied with V.

    Stages have been filled `filled` times before the first step.
    """
    k_full, k_free, v_full, v_free = barriers
    stage, phase = place_of(filled + step, STAGES)
    before, v_phase = place_of(filled + step - 1, STAGES)
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
def consume(
    out: gl.tensor, shared: gl.tuple, todo: gl.tuple, num_kv_heads: gl.tensor, scale_log2: gl.tensor,
    CONSUMER: gl.constexpr, GROUP: gl.constexpr, LANES: gl.constexpr, DIM: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Attend from ROWS // LANES queries of each turn, for all heads of one kv head; last keys first."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    # A row's elements next to each other, to be written 16 bytes at a time.
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS // LANES
    queries, keys, values, barriers, q_full, q_free, cleared = shared
    k_full, k_free, v_full, v_free = barriers
    work, plan, turns = todo
    row, query_start, query_len, first_query, context_len, num_tiles = work
    lane = CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))[:, None]
    query = lane // LANES
    dim = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))[None, :]
    offset = (query * (num_kv_heads * GROUP) + lane % LANES) * DIM + dim
    # So many times stages, queries and values past a context have been seen to.
    filled, asked, clearings = 0, 0, 0
    for turn in range(turns[0], turns[1]):
        filled, num_tiles = uniform(filled), uniform(num_tiles)
        if num_tiles > 0:
            q_place, q_phase = place_of(asked, QUERIES)
            q = queries.index(q_place * CONSUMERS + CONSUMER)
            first_position = context_len - query_len + first_query
            position = first_position + (CONSUMER * ROWS + gl.arange(0, ROWS, ROW)) // LANES
            peak = gl.full([ROWS], LOWEST, gl.float32, ROW)
            total = gl.zeros([ROWS], gl.float32, ROW)
            acc = gl.zeros([ROWS, DIM], gl.float32, RESULT)

            stage, phase = place_of(filled, STAGES)
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
            stage, phase = place_of(filled - 1, STAGES)
            mbarrier.wait(v_full.index(stage), phase)
            acc = warpgroup_mma(weights, values.index(stage), acc, is_async=True)
            first = (query_start + first_query) * num_kv_heads + gl.program_id(0)
            into = out + first.to(gl.int64) * (GROUP * DIM) + offset
            inside = query < query_len - first_query
            if GROUP < LANES:
                inside &= lane % LANES < GROUP
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
