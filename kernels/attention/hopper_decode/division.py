"""How `attention.hopper_decode.decode` divides rows among programs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.attention.splits import tiles_of_split

# Where rows fill the device each has one program for each head, but for long ones: of more than so many
# tiles, and a third longer than the row that is three eighths of all down, as padding comes last, if they are
# before that one. 32 rows of about 450 keys, the longest 2,048, take 47 µs a layer of Qwen3-0.6B on an H100,
# undivided 57; were all rows of more than eight tiles divided, equal ones of 1,200 keys would take 82 instead
# of 77. Those that `plan_division` leaves are divided at more than LONG_TILES, whatever the others are.
LONG_TILES = gl.constexpr(8)


@gluon.jit
def part_of_program(
    program: gl.tensor, long_rows: gl.tensor, long_splits: gl.tensor, undivided: gl.tensor,
    left_splits: gl.tensor,
) -> gl.tuple:  # fmt: skip
    """Return the place of a program's row by falling length, its split, and the programs that the row has.

    See `attention.splits.Division`. Rows come one after the other: long ones begin first, and those of
    their programs that only end are not the last to begin: until all have, the next kernel cannot.
    """
    long_programs = long_rows * long_splits
    left = long_rows + program - long_programs - undivided
    if program < long_programs:
        place, split, parts = program // long_splits, program % long_splits, long_splits
    elif left < 0:
        place, split, parts = undivided + left, 0, 1
    else:
        place, split, parts = undivided + left // left_splits, left % left_splits, left_splits
    return place, split, parts


@gluon.jit
def part_of_group(program: gl.tensor, GROUP: gl.constexpr, PROGRAMS: gl.constexpr) -> gl.tuple:
    """Return a program's kv head, how many heads of its group others before it have, and how many it has.

    PROGRAMS of them share a group.
    """
    place = program % PROGRAMS
    before = place * GROUP // PROGRAMS
    return program // PROGRAMS, before, (place + 1) * GROUP // PROGRAMS - before


@gluon.jit
def divide(
    context_len: gl.tensor, shared_len: gl.tensor, window: gl.tensor, order: gl.tensor,
    context_lens: gl.tensor, place: gl.tensor, parts: gl.tensor, long_rows: gl.tensor,
    undivided: gl.tensor, TILE: gl.constexpr, MERGES: gl.constexpr, SPARING: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """Return a row's first visible key behind what it shares, its tile, tiles, those in a split, splits.

    `parts` is how many splits there are programs for.
    MERGES: only rows that are long are split, and those behind the first `undivided` of more than LONG_TILES,
    these into all parts.
    """
    first_key = gl.where(window > 0, gl.maximum(context_len - window, 0), shared_len)
    first_tile = first_key // TILE
    tiles = gl.cdiv(context_len, TILE) - first_tile
    split_tiles = tiles_of_split(tiles, parts, SPARING)
    if MERGES:
        usual = gl.load(context_lens + gl.load(order + long_rows))
        whole_tiles = gl.maximum(gl.cdiv(usual * 4, 3 * TILE), LONG_TILES)
        divided = gl.minimum(gl.cdiv(tiles, whole_tiles), parts)
        behind = (place >= undivided) & (tiles > LONG_TILES)
        divided = gl.where(behind, parts, divided)
        split_tiles = gl.maximum(gl.cdiv(tiles, gl.maximum(divided, 1)), 1)
    return first_key, first_tile, tiles, split_tiles, gl.cdiv(tiles, split_tiles)
