"""What the warps of a program read of tokens and of a weight in few bits, a line of 128 columns each.

In Gluon, Triton's lower level. Of step s a program's w warps have lines s · w and what follows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from quire.kernels.quantised.decode import floats_of, fours_of, integers_of


@gluon.jit
def ask_for_line(
    tiles: gl.tuple, place: gl.tensor, lines_left: gl.tensor, step: gl.constexpr, LINES: gl.constexpr,
    WARPS: gl.constexpr, FORM: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """Ask for a line of each row and warp, 64 bytes at a time; zeros behind the last line."""
    BYTES: gl.constexpr = 128 if FORM == "float8" else 64
    for part in gl.static_range(BYTES // 64):
        own = place + (step * WARPS * BYTES + part * 64)
        if (step + 1) * WARPS <= LINES:
            tiles += (gl.load(own),)
        else:
            tiles += (gl.load(own, mask=lines_left > step * WARPS, other=0),)
    return tiles


@gluon.jit
def tokens_at(
    numbers: gl.tensor, column: gl.tensor, step: gl.constexpr, half: gl.constexpr, COLUMNS: gl.constexpr
) -> gl.tensor:
    """Return what tokens have in half of each warp's line; zeros behind the last column."""
    WARPS: gl.constexpr = gl.num_warps()
    FIRST: gl.constexpr = step * WARPS * 128 + half * 64
    if (step + 1) * WARPS * 128 <= COLUMNS:
        values = gl.load(numbers + FIRST)
    else:
        values = gl.load(numbers + FIRST, mask=column + FIRST < COLUMNS, other=0.0)
    return values


@gluon.jit
def group_of(
    warp: gl.tensor, step: gl.constexpr, half: gl.constexpr, GROUP: gl.constexpr, COLUMNS: gl.constexpr
) -> gl.tensor:
    """Return the group of each warp's half of a line: of longer groups the line tells."""
    WITHIN: gl.constexpr = half * 64 if GROUP == 64 else 0
    return gl.minimum((step * gl.num_warps() + warp) * 128 + WITHIN, COLUMNS - 1) // GROUP


@gluon.jit
def zeros_of(
    zeros: gl.tensor, group: gl.tensor, row: gl.tensor, ROWS: gl.constexpr, CODES: gl.constexpr
) -> gl.tensor:
    """Return the zero points of rows [warps, rows, 1], of a weight of ROWS; 8 where it has none.

    Of 4-bit floats they are the exponents of a line, see `decode.fours_of`.
    """
    if zeros is None:
        found = gl.full([group.shape[0], row.shape[1]], 8, gl.uint8, gl.SliceLayout(2, CODES))
    else:
        found = gl.load(zeros + (group * ROWS + row))
    return found[:, :, None]


@gluon.jit
def operand(
    tiles: gl.tuple, zero: gl.tensor, step: gl.constexpr, half: gl.constexpr, dtype: gl.constexpr,
    FORM: gl.constexpr, CODES: gl.constexpr, W: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Decode 64 columns of each warp's line."""
    if FORM == "float8":
        tile = gl.convert_layout(floats_of(tiles[2 * step + half], dtype), W)
    elif FORM == "float4":
        both = fours_of(tiles[step], zero, CODES)
        tile = gl.convert_layout(both[half], W)
    else:
        both = integers_of(tiles[step], zero, dtype)
        tile = gl.convert_layout(both[half], W)
    return tile


@gluon.jit
def summed(
    acc: gl.tensor, tile: gl.tensor, values: gl.tensor, scales: gl.tensor, place: gl.tensor,
    GROUPED: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Add a product to the sums, times its group's scales, which are at a place [warps, rows]."""
    if GROUPED:
        part = mma_v2(tile, values, gl.zeros_like(acc))
        acc += part * gl.load(scales + place).to(gl.float32)[:, :, None]
    else:
        acc = mma_v2(tile, values, acc)
    return acc
