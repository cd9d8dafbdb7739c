"""Fused linear layers of one token.

Each kernel asks for its first weights before the kernel ahead has ended (programmatic dependent launch).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch
from quire.kernels.pointwise.activation import Activation, UngatedActivation, activate

FEW_OUTPUTS = 2048
MANY_OUTPUTS = 4096
WHOLE_PIECES_OF_GATE = (2048, 3072)  # columns, in two pieces or three
# Times the columns that there are.
MOST_ASKED, MOST_ASKED_OF_FEW, MOST_ASKED_OF_GATE = 1.1, 1.15, 1.25


def linear_of_one(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    *,
    gated: bool,
    added: bool,
    activation: Activation | UngatedActivation | None = None,
) -> None:
    """Compute out [1, N] of x [1, K], as `linear.skinny.linear_of_few` does of a few tokens.

    activation: of the product, or of a gate, which has SiLU without one.
    """
    if len(x) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"this is for one token and a contiguous weight, got {len(x)} tokens and strides "
            f"{weight.stride()}"
        )
    columns, outputs = x.shape[1], out.shape[1]
    tiles = tiles_of_one(outputs, columns, gated=gated)
    _gemv_kernel[(triton.cdiv(outputs, tiles.rows),)](
        out, x, weight, bias, norm, eps,
        OUTPUTS=outputs, COLUMNS=columns, ROWS=tiles.rows, CHUNK=tiles.chunk, GATED=gated, ADDED=added,
        KIND=activation or ("silu" if gated else None),
        num_warps=max(tiles.chunk * x.element_size() // (64 * tiles.held), 1),
        **dependent_launch(x.device),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tiles:
    """A program's outputs, the columns of each that it holds at once, and how many of them a thread holds."""

    rows: int
    chunk: int
    held: int


def tiles_of_one(outputs: int, columns: int, *, gated: bool) -> Tiles:
    """Return how a weight [outputs, columns] is divided, or a gate and an up projection of that shape each.

    As measured for the products of eight models from 0.6B to 14B on an H200 (loadtest/results/gemv.json), and
    in the layers of eleven on an H100 (loadtest/results/one-token-tiles.json). Small programs leave the
    memory more to do while others end; but where there are few of them, or rows are long, each has to ask for
    much at once.
    """
    most = triton.next_power_of_2(columns)
    if gated:
        return _tiles_of_gate(outputs, columns)
    if outputs <= FEW_OUTPUTS:
        enough = outputs == FEW_OUTPUTS and columns >= 6144  # programs of 8 rows
        return Tiles(8 if enough else 4, min(2048, most), 8)
    few = outputs < MANY_OUTPUTS
    if few and columns >= 8192 and columns % 2048 == 0:
        return Tiles(2, 4096, 16) if columns == 8192 else Tiles(4, 2048, 8)
    if not few and columns >= 16384:
        return Tiles(8, 2048, 8)
    suited = _asked(columns, 1024) <= (MOST_ASKED_OF_FEW if few else MOST_ASKED) * columns
    return Tiles(4, min(1024, most), 8) if suited else Tiles(4, min(512, most), 16)


def _tiles_of_gate(outputs: int, columns: int) -> Tiles:
    most = triton.next_power_of_2(columns)
    if outputs < MANY_OUTPUTS:
        return Tiles(2, min(512, most), 16)
    if columns in WHOLE_PIECES_OF_GATE:
        return Tiles(1, 1024, 8 if columns == 2048 else 16)
    if _asked(columns, 512) > MOST_ASKED_OF_GATE * columns:
        return Tiles(1, most, 32)  # all at once, of what is not there nothing is read
    return Tiles(1, min(512, most), 16)


def _asked(columns: int, chunk: int) -> int:
    """Return for how many columns is asked, with those that are not there."""
    return triton.cdiv(columns, chunk) * chunk


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("weight",))


@triton.jit
def _weights(
    weight: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Rows `row` [R] of the weight from column `first` on: [R, CHUNK], 0 outside of it."""
    column = first + tl.arange(0, CHUNK)
    pointer = weight + row[:, None].to(tl.int64) * COLUMNS + column[None, :]
    inside = (row < OUTPUTS)[:, None] & (column < COLUMNS)[None, :]
    return tl.load(pointer, inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _gemv_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    KIND: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Compute ROWS outputs of the token; with GATED, those of the gate and of the up projection."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    up_weight = weight + OUTPUTS * COLUMNS
    tile = _weights(weight, row, 0, OUTPUTS, COLUMNS, CHUNK)
    if GATED:
        up_tile = _weights(up_weight, row, 0, OUTPUTS, COLUMNS, CHUNK)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()  # from here on what earlier kernels wrote may be read, and their inputs written
    acc = tl.zeros([ROWS, CHUNK], tl.float32)
    up_acc = tl.zeros([ROWS, CHUNK], tl.float32)
    squares = tl.zeros([CHUNK], tl.float32)
    for first in range(0, COLUMNS, CHUNK):
        column = first + tl.arange(0, CHUNK)
        inside = column < COLUMNS
        values = tl.load(x + column, inside, other=0.0).to(tl.float32)
        if norm is not None:
            squares += values * values
            values *= tl.load(norm + column, inside, other=0.0).to(tl.float32)
        acc += tile.to(tl.float32) * values[None, :]
        tile = _weights(weight, row, first + CHUNK, OUTPUTS, COLUMNS, CHUNK)
        if GATED:
            up_acc += up_tile.to(tl.float32) * values[None, :]
            up_tile = _weights(up_weight, row, first + CHUNK, OUTPUTS, COLUMNS, CHUNK)
    result = tl.sum(acc, 1)
    up = tl.sum(up_acc, 1)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(squares, 0) / COLUMNS + eps)
        result *= scale
        up *= scale
    inside_out = row < OUTPUTS
    dtype = out.dtype.element_ty
    if bias is not None:
        result += tl.load(bias + row, inside_out, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + OUTPUTS + row, inside_out, other=0.0).to(tl.float32)
    result = result.to(dtype)
    if KIND is not None:  # rounded where the unfused layers round, as below
        result = activate(result.to(tl.float32), KIND).to(dtype)
    if GATED:
        result = (result.to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)
    if ADDED:
        result = (tl.load(out + row, inside_out).to(tl.float32) + result.to(tl.float32)).to(dtype)
    tl.store(out + row, result, inside_out)
