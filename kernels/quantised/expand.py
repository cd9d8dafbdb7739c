"""Weights in few bits written out as the numbers that they stand for, for products of many tokens."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.quantised.decode import floats_of, integers_of
from quire.kernels.quantised.weight import LINE, QuantisedWeight

ROWS = 64  # of a program
DTYPES = (torch.bfloat16, torch.float16)  # that codes become


@gluon.jit
def _scaled(
    tile: gl.tensor, scales: gl.tensor, out: gl.tensor, first_row: gl.tensor, first: gl.tensor,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
) -> None:  # fmt: skip
    """Write 64 columns, times their group's scales, rounded once."""
    WRITTEN: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    numbers = gl.convert_layout(tile, WRITTEN).to(gl.float32)
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, WRITTEN))
    column = first + gl.arange(0, 64, gl.SliceLayout(0, WRITTEN))
    inside = row < OUTPUTS
    scale = gl.load(scales + (first // GROUP * OUTPUTS + row), mask=inside, other=0.0).to(gl.float32)
    place = out + row.to(gl.int64)[:, None] * COLUMNS + column[None, :]
    gl.store(place, (numbers * scale[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


@gluon.jit
def _kernel(
    out: gl.tensor, codes: gl.tensor, scales: gl.tensor, zeros: gl.tensor,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr,
    ROWS: gl.constexpr,
) -> None:  # fmt: skip
    """Expand a line of ROWS rows."""
    BYTES: gl.constexpr = 128 if FORM == "float8" else 64
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]], [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [ROWS, 64],
    )  # fmt: skip
    dtype: gl.constexpr = out.dtype.element_ty
    line = gl.program_id(0)
    first_row = gl.program_id(1) * ROWS
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, CODES))
    byte = gl.arange(0, 64, gl.SliceLayout(0, CODES))
    inside = (row < OUTPUTS)[:, None]
    place = codes + row.to(gl.int64)[:, None] * (COLUMNS // 128 * BYTES) + (line * BYTES + byte)[None, :]
    tile = gl.load(place, mask=inside, other=0)
    column = line * 128
    if FORM == "float8":
        first = floats_of(tile, dtype)
        second = floats_of(gl.load(place + 64, mask=inside, other=0), dtype)
    elif zeros is None:
        eight = gl.full([ROWS, 64], 8, gl.uint8, CODES)
        first, second = integers_of(tile, eight, dtype)
    else:
        group = column // GROUP * OUTPUTS
        zero = gl.load(zeros + (group + row), mask=row < OUTPUTS, other=0)
        first, second = integers_of(tile, zero[:, None], dtype)
        if GROUP == 64:
            zero = gl.load(zeros + (group + OUTPUTS + row), mask=row < OUTPUTS, other=0)
            _, second = integers_of(tile, zero[:, None], dtype)
    _scaled(first, scales, out, first_row, column, OUTPUTS, COLUMNS, GROUP, ROWS)
    _scaled(second, scales, out, first_row, column + 64, OUTPUTS, COLUMNS, GROUP, ROWS)


def expand(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """Return the numbers [outputs, inputs] that a weight stands for, in 16 bits."""
    if dtype not in DTYPES:
        raise ValueError(f"codes become bfloat16 or float16, not {dtype}")
    outputs, inputs = weight.shape
    out = torch.empty(outputs, inputs, dtype=dtype, device=weight.device)
    _kernel[(inputs // LINE, triton.cdiv(outputs, ROWS))](
        out, weight.codes, weight.scales, weight.zeros,
        OUTPUTS=outputs, COLUMNS=inputs, GROUP=weight.format.group or inputs,
        FORM=weight.format.codes, ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return out
