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


@gluon.jit
def multiply_by_warps(
    tiles: gl.tuple, up_tiles: gl.tuple, place: gl.tensor, up_place: gl.tensor, lines_left: gl.tensor,
    x_place: gl.tensor, x_column: gl.tensor, norm: gl.tensor, scales: gl.tensor, zeros: gl.tensor,
    s_warp: gl.tensor, s_row: gl.tensor, z_warp: gl.tensor, z_row: gl.tensor, up_rows: gl.constexpr,
    ALL_ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr,
    AHEAD: gl.constexpr, X_AHEAD: gl.constexpr, GATED: gl.constexpr, SUMS: gl.constexpr, CODES: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Multiply each warp's lines -> sums [warps, rows, tokens], of `up_rows` further rows, and of squares.

    tiles: the first AHEAD lines, which are asked for. With a norm squares of tokens [warps, tokens] are added
    up, and tokens are times its weights.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LINES: gl.constexpr = (COLUMNS + 127) // 128
    STEPS: gl.constexpr = (LINES + WARPS - 1) // WARPS
    ROWS: gl.constexpr = place.shape[1]
    TOKENS: gl.constexpr = x_place.shape[2]
    W: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    X: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    GROUPED: gl.constexpr = scales is not None and GROUP < COLUMNS
    dtype: gl.constexpr = x_place.dtype.element_ty
    acc = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, SUMS)
    up_acc = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, SUMS)
    squares = gl.zeros([WARPS, TOKENS], gl.float32, gl.SliceLayout(1, X))
    chunks: gl.tuple = ()
    for step in gl.static_range(min(X_AHEAD, STEPS)):
        for half in gl.static_range(2):
            chunks += (tokens_at(x_place, x_column, step, half, COLUMNS),)
    for step in gl.static_range(STEPS):
        for half in gl.static_range(2):
            values = chunks[2 * step + half]
            if step + X_AHEAD < STEPS:
                chunks += (tokens_at(x_place, x_column, step + X_AHEAD, half, COLUMNS),)
            if norm is not None:
                exact = values.to(gl.float32)
                squares += gl.sum(exact * exact, 1)
                values *= tokens_at(norm + x_column, x_column, step, half, COLUMNS)
            zero = zeros_of(zeros, group_of(z_warp, step, half, GROUP, COLUMNS), z_row, ALL_ROWS, CODES)
            tile = operand(tiles, zero, step, half, dtype, FORM, CODES, W)
            of_group = group_of(s_warp, step, half, GROUP, COLUMNS) * ALL_ROWS + s_row
            acc = summed(acc, tile, values, scales, of_group, GROUPED)
            if GATED:
                group = group_of(z_warp, step, half, GROUP, COLUMNS)
                zero = zeros_of(zeros, group, z_row + up_rows, ALL_ROWS, CODES)
                tile = operand(up_tiles, zero, step, half, dtype, FORM, CODES, W)
                up_acc = summed(up_acc, tile, values, scales, of_group + up_rows, GROUPED)
        if step + AHEAD < STEPS:
            tiles = ask_for_line(tiles, place, lines_left, step + AHEAD, LINES, WARPS, FORM)
            if GATED:
                up_tiles = ask_for_line(up_tiles, up_place, lines_left, step + AHEAD, LINES, WARPS, FORM)
    return acc, up_acc, squares
