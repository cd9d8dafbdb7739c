"""How `kernels.hopper_decode` divides rows among programs, and merges what these found."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.decode_products import LANES
from kernels.tile import LOWEST

# Where rows fill the device each has one program for each head, but for long ones: of more than so many
# tiles, and a third longer than the row that is three eighths of all down, as padding comes last. 32 rows of
# about 450 keys, the longest 2,048, take 47 µs a layer of Qwen3-0.6B on an H100, undivided 57; were all rows
# of more than eight tiles divided, equal ones of 1,200 keys would take 82 instead of 77. Those that
# `plan_division` leaves are divided at more than LONG_TILES, whatever the others are.
LONG_TILES = gl.constexpr(8)


@gluon.jit
def divide(
    context_len: gl.tensor, window: gl.tensor, order: gl.tensor, context_lens: gl.tensor,
    undivided: gl.tensor, left_splits: gl.tensor, max_splits: gl.tensor, TILE: gl.constexpr,
    MERGES: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """A row's first visible key and tile, its tiles, tiles in a split, and splits with work.

    MERGES: only rows that are long are split, and those behind the first `undivided` of more than LONG_TILES,
    these into `left_splits`.
    """
    first_key = gl.where(window > 0, gl.maximum(context_len - window, 0), 0)
    first_tile = first_key // TILE
    tiles = gl.cdiv(context_len, TILE) - first_tile
    split_tiles = gl.maximum(gl.cdiv(tiles, max_splits), 1)
    if MERGES:
        usual = gl.load(context_lens + gl.load(order + gl.num_programs(2) * 3 // 8))
        whole_tiles = gl.maximum(gl.cdiv(usual * 4, 3 * TILE), LONG_TILES)
        divided = gl.minimum(gl.cdiv(tiles, whole_tiles), max_splits)
        behind = (gl.program_id(2) >= undivided) & (tiles > LONG_TILES)
        divided = gl.where(behind, left_splits, divided)
        split_tiles = gl.maximum(gl.cdiv(tiles, gl.maximum(divided, 1)), 1)
    return first_key, first_tile, tiles, split_tiles, gl.cdiv(tiles, split_tiles)


@gluon.jit
def merged_parts(
    partials: gl.tensor, lse: gl.tensor, first: gl.tensor, heads: gl.tensor, splits: gl.tensor,
    in_group: gl.tensor, dim: gl.tensor, DIM: gl.constexpr, LAYOUT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """[LANES, DIM] of a row's heads, whose partial results are at `first` [LANES] and `heads` further each.

    Other programs wrote them: they are read past the L1 cache, which may hold what was there before.
    """
    merged = gl.zeros([LANES, DIM], gl.float32, LAYOUT)
    peak = gl.full([LANES], LOWEST, gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.zeros([LANES], gl.float32, gl.SliceLayout(1, LAYOUT))
    for split in range(splits):
        place = first + split * heads
        part_lse = gl.load(lse + place, in_group, other=0.0, cache_modifier=".cg")
        value = gl.load(
            partials + place[:, None] * DIM + dim[None, :], in_group[:, None], other=0.0, cache_modifier=".cg"
        )
        new_peak = gl.maximum(peak, part_lse)
        decay = gl.exp2(peak - new_peak)
        weight = gl.exp2(part_lse - new_peak)
        merged = merged * decay[:, None] + value * weight[:, None]
        total = total * decay + weight
        peak = new_peak
    return merged / total[:, None]
