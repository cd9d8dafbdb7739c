"""Fused linear layers of a few tokens, by weights in few bits, on tensor cores.

In Gluon, Triton's lower level. As in `linear.skinny` each warp of a program takes a part of the columns, here
lines in turn, and reads the weight from global memory as the tensor cores want it, 16 bytes a thread.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch
from quire.kernels.linear.linear import Matrix
from quire.kernels.quantised.expand import DTYPES
from quire.kernels.quantised.lines import ask_for_line, multiply_by_warps
from quire.kernels.quantised.weight import LINE, QuantisedWeight, WeightFormat

MOST_TOKENS = 16  # of a launch
MOST_READ = 4.0  # bytes a number: more launches would read more than expanding the weight reads and writes
ROWS = 16  # outputs of a program, each a row of the weight
AHEAD_BYTES, AHEAD_BYTES_OF_GATE = 1024, 256  # of a row that a warp has asked for, of a gate and an up each

# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("codes",))


@gluon.jit(do_not_specialize=["num_tokens"])
def _kernel(
    out: gl.tensor, x: gl.tensor, codes: gl.tensor, scales: gl.tensor, zeros: gl.tensor, bias: gl.tensor,
    norm: gl.tensor, eps: gl.tensor, num_tokens: gl.tensor,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, AHEAD: gl.constexpr, X_AHEAD: gl.constexpr, GATED: gl.constexpr,
    ADDED: gl.constexpr, DEPENDENT: gl.constexpr,
) -> None:  # fmt: skip
    """Compute ROWS outputs of all tokens; with GATED, those of the gate and of the up projection."""
    WARPS: gl.constexpr = gl.num_warps()
    LINES: gl.constexpr = COLUMNS // 128
    STEPS: gl.constexpr = (LINES + WARPS - 1) // WARPS
    BYTES: gl.constexpr = 128 if FORM == "float8" else 64  # of a row, in a line
    ALL_ROWS: gl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    X: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    OF_WARPS: gl.constexpr = [[1, 0, 0], [2, 0, 0], [4, 0, 0]] if WARPS == 8 else [[1, 0, 0], [2, 0, 0]]
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 8, 0]],
        [[0, 0, 16], [0, 0, 32], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        OF_WARPS, [], [WARPS, 16, 64],
    )  # fmt: skip
    dtype: gl.constexpr = x.dtype.element_ty
    first_row = gl.program_id(0) * ROWS
    c_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, CODES)))[:, None, None]
    c_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, CODES)))[None, :, None]
    c_byte = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, CODES)))[None, None, :]
    LINE_BYTES: gl.constexpr = LINES * BYTES
    place = codes + (c_row.to(gl.int64) * LINE_BYTES + (c_warp * BYTES + c_byte))
    up_place = place + OUTPUTS * LINE_BYTES
    lines_left = LINES - c_warp

    tiles: gl.tuple = ()
    up_tiles: gl.tuple = ()
    for step in gl.static_range(min(AHEAD, STEPS)):
        tiles = ask_for_line(tiles, place, lines_left, step, LINES, WARPS, FORM)
        if GATED:
            up_tiles = ask_for_line(up_tiles, up_place, lines_left, step, LINES, WARPS, FORM)

    RESULT: gl.constexpr = gl.SliceLayout(0, SUMS)
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, RESULT))[None, :]
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, RESULT))[:, None]
    where = out + (token * OUTPUTS + row)
    inside = (token < num_tokens) & (row < OUTPUTS)
    if DEPENDENT:
        if not GATED:
            gdc_launch_dependents()
        gdc_wait()  # from here on what earlier kernels wrote may be read, and their inputs written
        if GATED:  # sooner, the next weights would take the memory's time from these, the most of a layer
            gdc_launch_dependents()
    if ADDED:
        before = gl.load(where, mask=inside, other=0.0)

    x_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None, None]
    x_column = x_warp * 128 + gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
    x_token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    x_place = x + gl.minimum(x_token, num_tokens - 1) * COLUMNS + x_column
    s_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None]
    s_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :]
    z_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, CODES)))[:, None]
    z_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, CODES)))[None, :]
    acc, up_acc, squares = multiply_by_warps(
        tiles, up_tiles, place, up_place, lines_left, x_place, x_column, norm, scales, zeros, s_warp, s_row,
        z_warp, z_row, OUTPUTS, ALL_ROWS, COLUMNS, GROUP, FORM, AHEAD, X_AHEAD, GATED, SUMS, CODES,
    )  # fmt: skip

    result = gl.sum(acc, 0)
    up = gl.sum(up_acc, 0)
    if GROUP >= COLUMNS:
        result *= gl.load(scales + row).to(gl.float32)
        if GATED:
            up *= gl.load(scales + OUTPUTS + row).to(gl.float32)
    if norm is not None:
        scale = gl.rsqrt(gl.sum(squares, 0) / COLUMNS + eps)
        scale = gl.convert_layout(scale, gl.SliceLayout(0, RESULT))[None, :]
        result *= scale
        up *= scale
    if bias is not None:
        result += gl.load(bias + row).to(gl.float32)
        if GATED:
            up += gl.load(bias + OUTPUTS + row).to(gl.float32)
    result = result.to(dtype)
    if GATED:  # rounded where the unfused layers round
        gate = result.to(gl.float32)
        silu = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
        result = (silu * up.to(dtype).to(gl.float32)).to(dtype)
    if ADDED:
        result = (before.to(gl.float32) + result.to(gl.float32)).to(dtype)
    gl.store(where, result, mask=inside)


def quantised_of_few(
    out: Tensor,
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    *,
    gated: bool,
    added: bool,
) -> None:
    """Compute out [T, N] of x [T, K], as `linear.skinny.linear_of_few` does, MOST_TOKENS at a time."""
    if out.shape[1] % ROWS or not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError(
            f"this is for a multiple of {ROWS} outputs and contiguous tokens; got {out.shape[1]} outputs and "
            f"strides {x.stride()} and {out.stride()}"
        )
    for begin in range(0, len(x), MOST_TOKENS):
        some = slice(begin, begin + MOST_TOKENS)
        _launch(out[some], x[some], weight, bias, norm, eps, gated=gated, added=added)


def _launch(
    out: Tensor,
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    *,
    gated: bool,
    added: bool,
) -> None:
    (count, columns), outputs = x.shape, out.shape[1]
    tokens = 8 if count <= 8 else 16
    _kernel[(outputs // ROWS,)](
        out, x, weight.codes, weight.scales, weight.zeros, bias, norm, eps, count,
        OUTPUTS=outputs, COLUMNS=columns, GROUP=weight.format.group or columns, FORM=weight.format.codes,
        TOKENS=tokens, ROWS=ROWS,
        AHEAD=lines_ahead(weight.format, gated=gated), X_AHEAD=tokens_ahead(tokens), GATED=gated, ADDED=added,
        num_warps=warps_of(gated=gated, normed=norm is not None),
        **dependent_launch(x.device),
    )  # fmt: skip


def lines_ahead(form: WeightFormat, *, gated: bool) -> int:
    """Return how many lines of each weight a warp asks for before it multiplies."""
    of_line = LINE if form.codes == "float8" else LINE // 2
    return (AHEAD_BYTES_OF_GATE if gated else AHEAD_BYTES) // of_line


def tokens_ahead(tokens: int) -> int:
    """Return of how many lines a warp asks for tokens before it multiplies: registers hold no more."""
    return 2 if tokens <= 8 else 1


def warps_of(*, gated: bool, normed: bool) -> int:
    return 4 if gated or normed else 8


def suits(matrix: Matrix, dtype: torch.dtype, *, gated: bool) -> bool:
    """Tell whether a weight's outputs and tokens of a dtype are what `quantised_of_few` takes."""
    return matrix.outputs % (2 * ROWS if gated else ROWS) == 0 and dtype in DTYPES


def most_tokens(form: WeightFormat) -> int:
    """Return up to how many tokens are quicker here than by an expanded weight."""
    return int(MOST_READ / form.num_bytes(1, LINE) * LINE) * MOST_TOKENS
