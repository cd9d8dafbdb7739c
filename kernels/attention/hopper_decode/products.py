"""A warp's products with the keys and the values of a tile in `attention.hopper_decode.decode`.

Of 16-bit numbers in one product, of `formats.fp12`'s planes in four: words of a plane and of the one with
what is left become two numbers of a quarter of the dimensions by masks. What is kept by quarters is a tuple
of them, else of one. Heads of more than WIDEST are multiplied in halves, which stay in shared memory until
then: PIECES of a head are 4, 1 or 2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from quire.kernels.attention.hopper_decode.tiles import WARPS, WIDEST
from quire.kernels.formats.fp12 import PAIRS

LANES = gl.constexpr(16)  # query heads of a product, and one row of them is the newest key
# A number made of words has an exponent too small by 112. Queries and weights are made larger by a part of
# that, as bf16 has room for, and fp32's sums by the rest.
RAISED = gl.constexpr(2.0**60)
RAISED_AFTER = gl.constexpr(2.0**52)


@gluon.jit
def _quarter(low: gl.tensor, rest: gl.tensor, NUMBER: gl.constexpr) -> gl.tensor:
    return gl.inline_asm_elementwise(
        PAIRS[NUMBER], "=r,r,r", [low, rest], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def as_operands(
    heads: gl.tensor, SCORES: gl.constexpr, QUERIES: gl.constexpr, MERGED: gl.constexpr, PIECES: gl.constexpr
) -> gl.tuple:  # fmt: skip
    """Query heads [LANES, DIM] for products with keys: in registers, or of halves in shared memory."""
    DIM: gl.constexpr = heads.shape[1]
    if PIECES == 2:
        KEPT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        kept = gl.allocate_shared_memory(heads.dtype, heads.shape, KEPT)
        kept.store(heads)
        return (kept,)
    elif PIECES == 4:
        spread, _ = gl.broadcast(heads[None, :, :], gl.zeros([WARPS, LANES, DIM], heads.dtype, MERGED))
        raised = (spread.to(gl.float32) * RAISED).to(heads.dtype)
        raised = gl.convert_layout(raised, SCORES)  # a thread of which has all quarters
        even, odd = gl.split(raised.reshape([WARPS, LANES, 2, 2, DIM // 4]).permute((0, 1, 4, 2, 3)))
        q0, q2 = gl.split(even)
        q1, q3 = gl.split(odd)
        q0, q1 = gl.convert_layout(q0, QUERIES), gl.convert_layout(q1, QUERIES)
        return q0, q1, gl.convert_layout(q2, QUERIES), gl.convert_layout(q3, QUERIES)
    else:
        spread, _ = gl.broadcast(heads[None, :, :], gl.zeros([WARPS, LANES, DIM], heads.dtype, MERGED))
        return (gl.convert_layout(spread, QUERIES),)


@gluon.jit
def no_values(DIM: gl.constexpr, SCORES: gl.constexpr, PIECES: gl.constexpr) -> gl.tuple:
    """Sums of values, as `with_values` goes on with."""
    sums: gl.tuple = ()
    for _ in gl.static_range(PIECES):
        sums += (gl.zeros([WARPS, LANES, DIM // PIECES], gl.float32, SCORES),)
    return sums


@gluon.jit
def scores_of(
    queries: gl.tuple, stages: gl.tuple, stage: gl.tensor, KEYS: gl.constexpr, SCORES: gl.constexpr,
    QUERIES: gl.constexpr, K: gl.constexpr, PIECES: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Return [WARPS, LANES, KEYS] of queries as `as_operands` gives them and the keys of a stage."""
    scores = gl.zeros([WARPS, LANES, KEYS], gl.float32, SCORES)
    if PIECES == 4:
        a = stages[0].index(stage).permute((0, 2, 1)).load(K)
        rest = stages[2].index(stage).permute((0, 2, 1)).load(K)
        scores = mma_v2(queries[0], _quarter(a, rest, 0), scores)
        scores = mma_v2(queries[1], _quarter(a, rest, 1), scores)
        b = stages[1].index(stage).permute((0, 2, 1)).load(K)
        scores = mma_v2(queries[2], _quarter(b, rest, 2), scores)
        scores = mma_v2(queries[3], _quarter(b, rest, 3), scores)
        scale = stages[6].index(stage).load(gl.SliceLayout(1, SCORES)).to(gl.int16)
        return scores * (scale.to(gl.float16, bitcast=True).to(gl.float32) * RAISED_AFTER)[:, None, :]
    elif PIECES == 2:
        for half in gl.static_range(2):
            kept = queries[0].slice(half * WIDEST, WIDEST, 1).load(gl.SliceLayout(0, QUERIES))
            spread, _ = gl.broadcast(kept[None, :, :], gl.zeros([WARPS, LANES, WIDEST], kept.dtype, QUERIES))
            scores = mma_v2(spread, stages[half].index(stage).permute((0, 2, 1)).load(K), scores)
        return scores
    else:
        k = stages[0].index(stage).permute((0, 2, 1)).load(K)
        return mma_v2(queries[0], k, scores)


@gluon.jit
def values_of(
    stages: gl.tuple, stage: gl.tensor, SCORES: gl.constexpr, K: gl.constexpr, PIECES: gl.constexpr
) -> gl.tuple:
    """Return the values of a stage for `with_values`.

    In registers: the stage may then be filled again. But those of halves stay where they are.
    """
    if PIECES == 4:
        a = stages[3].index(stage).load(K)
        b = stages[4].index(stage).load(K)
        rest = stages[5].index(stage).load(K)
        scale = (stages[6].index(stage).load(gl.SliceLayout(1, SCORES)) >> 16).to(gl.int16)
        return a, b, rest, scale.to(gl.float16, bitcast=True).to(gl.float32) * RAISED
    elif PIECES == 2:
        return stages[2].index(stage), stages[3].index(stage)
    else:
        return (stages[1].index(stage).load(K),)


@gluon.jit
def with_values(
    sums: gl.tuple, decay: gl.tensor, weights: gl.tensor, values: gl.tuple, dtype: gl.constexpr,
    QUERIES: gl.constexpr, K: gl.constexpr, PIECES: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """Add to sums · decay [WARPS, LANES, 1] a tile's values, weighted [WARPS, LANES, KEYS]."""
    if PIECES == 4:
        a, b, rest, scale = values
        weighing = gl.convert_layout((weights * scale[:, None, :]).to(dtype), QUERIES)
        sum0 = mma_v2(weighing, _quarter(a, rest, 0), sums[0] * decay)
        sum1 = mma_v2(weighing, _quarter(a, rest, 1), sums[1] * decay)
        sum2 = mma_v2(weighing, _quarter(b, rest, 2), sums[2] * decay)
        return sum0, sum1, sum2, mma_v2(weighing, _quarter(b, rest, 3), sums[3] * decay)
    elif PIECES == 2:
        weighing = gl.convert_layout(weights.to(dtype), QUERIES)
        low = mma_v2(weighing, values[0].load(K), sums[0] * decay)
        return low, mma_v2(weighing, values[1].load(K), sums[1] * decay)
    else:
        return (mma_v2(gl.convert_layout(weights.to(dtype), QUERIES), values[0], sums[0] * decay),)


@gluon.jit
def merged_sums(sums: gl.tuple, share: gl.tensor, MERGED: gl.constexpr, PIECES: gl.constexpr) -> gl.tensor:
    """Add up warps' sums of values, of each as much as `share` [WARPS, LANES] says: [LANES, DIM]."""
    if PIECES == 4:
        pairs = gl.join(gl.join(sums[0], sums[2]), gl.join(sums[1], sums[3])).permute((0, 1, 3, 4, 2))
        DIM: gl.constexpr = 4 * sums[0].shape[2]
        whole = gl.convert_layout(pairs.reshape([WARPS, LANES, DIM]), MERGED) * RAISED_AFTER
        return gl.sum(whole * share[:, :, None], 0)
    elif PIECES == 2:  # one after the other, for want of registers
        HALF: gl.constexpr = gl.BlockedLayout(
            [WARPS, 1, 8], [1, 256 // WIDEST, WIDEST // 8], [1, WARPS, 1], [2, 1, 0]
        )
        share = gl.convert_layout(share, gl.SliceLayout(2, HALF))[:, :, None]
        low = gl.sum(gl.convert_layout(sums[0], HALF) * share, 0)
        high = gl.sum(gl.convert_layout(sums[1], HALF) * share, 0)
        both = gl.join(low, high).permute((0, 2, 1)).reshape([LANES, 2 * WIDEST])
        return gl.convert_layout(both, gl.SliceLayout(0, MERGED))
    else:
        return gl.sum(gl.convert_layout(sums[0], MERGED) * share[:, :, None], 0)
