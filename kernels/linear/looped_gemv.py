"""A linear layer of one token with as many outputs as a vocabulary has, by programs that loop over them.

There are as many as a GPU holds at once. Each keeps the token, and asks for its next rows of the weight
before it adds up those at hand; the first ones before the kernel ahead has ended.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.gpu import gpu_of
from quire.kernels.launch import dependent_launch

LEAST_OUTPUTS = 1 << 16
HELD = 4096  # numbers of the weight that a program adds up at a time, and what is left of its rows
MOST_COLUMNS = 2 * HELD
PROGRAMS = 4  # of a multiprocessor, which has registers for no more where rows are wide
WARPS = 4
CHUNK = 512  # columns that a program of `linear.gemv` has of such a weight at once


def prefers(outputs: int, columns: int) -> bool:
    """Tell whether one token is left to this: where `linear.gemv` would ask for many columns beyond a row."""
    return outputs >= LEAST_OUTPUTS and columns % CHUNK != 0 and CHUNK < columns < MOST_COLUMNS


def looped_linear_of_one(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Compute out [1, N] of x [1, K] and weight [N, K], contiguous."""
    outputs, columns = weight.shape
    if x.shape != (1, columns) or not weight.is_contiguous() or not 0 < columns < MOST_COLUMNS:
        raise ValueError(
            f"this is for one token of less than {MOST_COLUMNS} columns and a contiguous weight, got "
            f"{[*x.shape]} and strides {weight.stride()}"
        )
    main = 1 << (columns.bit_length() - 1)
    rows = max(HELD // main, 1)
    programs = min(triton.cdiv(outputs, rows), PROGRAMS * max(gpu_of(x.device).multiprocessors, 1))
    _looped_kernel[(programs,)](
        out, x, weight,
        OUTPUTS=outputs, COLUMNS=columns, ROWS=rows, MAIN=main,
        REST=triton.next_power_of_2(max(columns - main, 16)), num_warps=WARPS,
        **dependent_launch(x.device),
    )  # fmt: skip


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("weight",))


@triton.jit
def _rows_of(
    weight: tl.tensor, row: tl.tensor, column: tl.tensor, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr
) -> tl.tensor:
    """Rows and columns of the weight, 0 outside of it."""
    place = weight + row[:, None].to(tl.int64) * COLUMNS + column[None, :]
    inside = (row < OUTPUTS)[:, None] & (column < COLUMNS)[None, :]
    return tl.load(place, inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _looped_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Compute ROWS outputs at a time: of MAIN columns, a power of two, and those behind them."""
    first = tl.program_id(0) * ROWS
    stride = tl.num_programs(0) * ROWS
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, MAIN)
    behind = MAIN + tl.arange(0, REST)
    tile = _rows_of(weight, row, column, OUTPUTS, COLUMNS)
    rest = _rows_of(weight, row, behind, OUTPUTS, COLUMNS)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()  # from here on what earlier kernels wrote may be read, and their inputs written
    values = tl.load(x + column).to(tl.float32)[None, :]
    others = tl.load(x + behind, behind < COLUMNS, other=0.0).to(tl.float32)[None, :]
    for _ in range(first, OUTPUTS, stride):
        following = row + stride
        next_tile = _rows_of(weight, following, column, OUTPUTS, COLUMNS)
        next_rest = _rows_of(weight, following, behind, OUTPUTS, COLUMNS)
        result = tl.sum(tile.to(tl.float32) * values, 1)
        result += tl.sum(rest.to(tl.float32) * others, 1)
        tl.store(out + row, result.to(out.dtype.element_ty), row < OUTPUTS)
        row, tile, rest = following, next_tile, next_rest
