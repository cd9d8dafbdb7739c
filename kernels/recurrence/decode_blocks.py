"""In which blocks of each cache group decodes find their sequences' states, and in which they leave them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.recurrence.step import NO_STATE, PADS

ROWS, WARPS = 128, 4  # decodes of a program
_NO_STATE, _PADS = tl.constexpr(NO_STATE), tl.constexpr(PADS)


def decode_blocks(tables: Tensor, rows: Tensor, lens: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the blocks before and after the token of each decode [G, B] i32, as `StateStep` has them.

    tables [G, *, max_blocks] i32, of each cache group; rows [B] i32: each one's table; lens [B] i32: its
    tokens, this one counted, 0 pads.
    The kernel is no dependent one: what follows it may read what it gives before it waits itself.
    """
    groups, count = len(tables), len(rows)
    # Of each group from where kernels read 16 bytes at once.
    before, after = (rows.new_empty(groups, -(-count // 4) * 4)[:, :count] for _ in range(2))
    if count:
        _kernel[(triton.cdiv(count, ROWS), groups)](
            tables, rows, lens, before, after, count, tables.stride(1), tables.stride(0), before.stride(0),
            block_size, ROWS, num_warps=WARPS,
        )  # fmt: skip
    return before, after


def decode_blocks_reference(
    tables: Tensor, rows: Tensor, lens: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Do the same as `decode_blocks` in plain torch."""
    numbers, lengths = rows.long(), lens.long()
    before = tables[:, numbers, (lengths - 2).clamp(min=0) // block_size]
    after = tables[:, numbers, (lengths - 1).clamp(min=0) // block_size]
    return (
        torch.where(lengths > 1, before, NO_STATE).int(),
        torch.where(lengths > 0, after, PADS).int(),
    )


@triton.jit(do_not_specialize=["count", "blocks_stride"])
def _kernel(
    tables_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    before_ptr: tl.tensor,
    after_ptr: tl.tensor,
    count: tl.tensor,
    table_stride: tl.tensor,
    group_stride: tl.tensor,
    blocks_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    decode = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = decode < count
    length = tl.load(lens_ptr + decode, there, other=0)
    group = tl.program_id(1).to(tl.int64)
    before_ptr += group * blocks_stride
    after_ptr += group * blocks_stride
    tables_ptr += group * group_stride
    table = tables_ptr + tl.load(rows_ptr + decode, there, other=0).to(tl.int64) * table_stride
    before = tl.load(table + (length - 2) // BLOCK_SIZE, there & (length > 1), other=_NO_STATE)
    after = tl.load(table + (length - 1) // BLOCK_SIZE, there & (length > 0), other=_PADS)
    tl.store(before_ptr + decode, before, there)
    tl.store(after_ptr + decode, after, there)
