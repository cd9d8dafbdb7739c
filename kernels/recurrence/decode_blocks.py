"""In which blocks decodes find their sequences' states, and in which they leave them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.recurrence.step import NO_STATE, PADS

ROWS, WARPS = 128, 4  # decodes of a program
_NO_STATE, _PADS = tl.constexpr(NO_STATE), tl.constexpr(PADS)


def decode_blocks(tables: Tensor, rows: Tensor, lens: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the blocks before and after the token of each decode [B] i32, as `StateStep` has them.

    tables [*, max_blocks] i32; rows [B] i32: each one's table; lens [B] i32: its tokens, this one counted, 0
    pads.
    The kernel is no dependent one: what follows it may read what it gives before it waits itself.
    """
    before, after = torch.empty_like(rows), torch.empty_like(rows)
    if len(rows):
        _kernel[(triton.cdiv(len(rows), ROWS),)](
            tables, rows, lens, before, after, len(rows), tables.stride(0), block_size, ROWS, num_warps=WARPS
        )
    return before, after


def decode_blocks_reference(
    tables: Tensor, rows: Tensor, lens: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Do the same as `decode_blocks` in plain torch."""
    numbers, lengths = rows.long(), lens.long()
    before = tables[numbers, (lengths - 2).clamp(min=0) // block_size]
    after = tables[numbers, (lengths - 1).clamp(min=0) // block_size]
    return (
        torch.where(lengths > 1, before, NO_STATE).int(),
        torch.where(lengths > 0, after, PADS).int(),
    )


@triton.jit
def _kernel(
    tables_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    before_ptr: tl.tensor,
    after_ptr: tl.tensor,
    count: tl.tensor,
    table_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    decode = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = decode < count
    length = tl.load(lens_ptr + decode, there, other=0)
    table = tables_ptr + tl.load(rows_ptr + decode, there, other=0).to(tl.int64) * table_stride
    before = tl.load(table + (length - 2) // BLOCK_SIZE, there & (length > 1), other=_NO_STATE)
    after = tl.load(table + (length - 1) // BLOCK_SIZE, there & (length > 0), other=_PADS)
    tl.store(before_ptr + decode, before, there)
    tl.store(after_ptr + decode, after, there)
