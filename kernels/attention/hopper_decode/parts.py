"""Parts of a row's attention in Hopper's decode, from other kernels or programs, and their merging.

Parts are a tuple of the highest score (base 2) [LANES], the sum of weights beside it [LANES] and that of
weighted values [LANES, DIM].
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.attention.cascade import MAX_SPANS, spans_of
from quire.kernels.attention.hopper_decode.products import LANES
from quire.kernels.attention.kv_tile import LOWEST

AT_ONCE = gl.constexpr(4)  # parts of a row that are read at the same time to be merged


@gluon.jit
def no_parts(DIM: gl.constexpr, LAYOUT: gl.constexpr) -> gl.tuple:
    peak = gl.full([LANES], LOWEST, gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.zeros([LANES], gl.float32, gl.SliceLayout(1, LAYOUT))
    return peak, total, gl.zeros([LANES, DIM], gl.float32, LAYOUT)


@gluon.jit
def both_parts(some: gl.tuple, others: gl.tuple) -> gl.tuple:
    peak = gl.maximum(some[0], others[0])
    decay = gl.exp2(some[0] - peak)
    weight = gl.exp2(others[0] - peak)
    total = some[1] * decay + others[1] * weight
    return peak, total, some[2] * decay[:, None] + others[2] * weight[:, None]


@gluon.jit
def with_part(parts: gl.tuple, lse: gl.tensor, values: gl.tensor) -> gl.tuple:
    """Parts and one more, as its log-sum-exps [LANES] and its results [LANES or 1, DIM]."""
    peak = gl.maximum(parts[0], lse)
    decay = gl.exp2(parts[0] - peak)
    weight = gl.exp2(lse - peak)
    return peak, parts[1] * decay + weight, parts[2] * decay[:, None] + values * weight[:, None]


@gluon.jit
def prefix_parts(
    partials: gl.tensor, lse: gl.tensor, shared_len: gl.tensor, heads: gl.tuple, dim: gl.tensor,
    HEAD_DIM: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """Return what `attention.cascade` found for a row.

    heads: the row, its heads [LANES], which of these are some, and how many there are in all.
    """
    row, head, is_head, num_heads = heads
    parts = no_parts(DIM, LAYOUT)
    _, spans = spans_of(shared_len)
    for span in range(spans):
        place = (row.to(gl.int64) * MAX_SPANS + span) * num_heads + head
        span_lse = gl.load(lse + place, is_head, other=0.0)
        held = is_head[:, None] & (dim < HEAD_DIM)[None, :]
        values = gl.load(partials + (place[:, None] * HEAD_DIM + dim[None, :]), held, other=0.0)
        parts = with_part(parts, span_lse, values)
    return parts


@gluon.jit
def merged_parts(
    partials: gl.tensor, lse: gl.tensor, first: gl.tensor, heads: gl.tensor, splits: gl.tensor,
    in_group: gl.tensor, dim: gl.tensor, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Merge a row's heads [LANES, DIM], whose parts are at `first` [LANES] and `heads` further each.

    Other programs wrote them: they are read past the L1 cache, which may hold what was there before.
    """
    peak, total, merged = no_parts(DIM, LAYOUT)
    for begin in range(0, splits, AT_ONCE):
        part_lses: gl.tuple = ()
        values: gl.tuple = ()
        for i in gl.static_range(AT_ONCE):
            held = in_group & (begin + i < splits)
            place = first + (begin + i) * heads
            part_lses += (gl.load(lse + place, held, other=float("-inf"), cache_modifier=".cg"),)
            value = partials + (place[:, None] * HEAD_DIM + dim[None, :])
            real = held[:, None] & (dim < HEAD_DIM)[None, :]
            values += (gl.load(value, real, other=0.0, cache_modifier=".cg"),)
        new_peak = peak
        for i in gl.static_range(AT_ONCE):
            new_peak = gl.maximum(new_peak, part_lses[i])
        decay = gl.exp2(peak - new_peak)
        merged *= decay[:, None]
        total *= decay
        for i in gl.static_range(AT_ONCE):
            weight = gl.exp2(part_lses[i] - new_peak)
            merged += values[i] * weight[:, None]
            total += weight
        peak = new_peak
    return merged / total[:, None]
