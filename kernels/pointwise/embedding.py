"""Rows of the embedding matrix, fetched so that the first layer can begin to read its weights meanwhile."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch

BLOCK = 1024  # columns of a program


def embed(tokens: Tensor, table: Tensor, first: int | None = None, *, scale: float | None = None) -> Tensor:
    """Look up tokens [T] i32, each below V, in table [V, H], contiguous -> [T, H].

    first: the token of the table's first row, of a part of a vocabulary; tokens elsewhere give zeros. scale:
    what rows are multiplied by, as Gemma's are, a number of the table's dtype.
    """
    if not table.is_contiguous():
        raise ValueError(f"the embedding matrix must be contiguous, its strides are {table.stride()}")
    columns = table.shape[1]
    out = torch.empty(len(tokens), columns, dtype=table.dtype, device=table.device)
    if len(tokens):
        _embed_kernel[(len(tokens), triton.cdiv(columns, BLOCK))](
            out, tokens, table, scale, columns, BLOCK, first, len(table), num_warps=4,
            **dependent_launch(table.device),
        )  # fmt: skip
    return out


def embed_reference(
    tokens: Tensor, table: Tensor, first: int | None = None, *, scale: float | None = None
) -> Tensor:
    """Do the same as `embed` in plain torch."""
    if scale is not None:
        return embed_reference(tokens, table, first) * scale
    if first is None:
        return F.embedding(tokens, table)
    local = tokens - first
    is_elsewhere = (local < 0) | (local >= len(table))
    found = F.embedding(local.clamp(0, len(table) - 1), table)
    return found.masked_fill_(is_elsewhere.unsqueeze(1), 0)


@triton.jit
def _embed_kernel(
    out: tl.tensor,
    tokens: tl.tensor,
    table: tl.tensor,
    scale: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        gdc_wait()
        # Not before: the kernels of the first layer may read what the kernel ahead wrote without waiting.
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    if FIRST is None:
        row = table + tl.load(tokens + token).to(tl.int64) * COLUMNS
        values = tl.load(row + column, inside)
    else:
        local = tl.load(tokens + token).to(tl.int64) - FIRST
        is_here = (local >= 0) & (local < ROWS)
        values = tl.load(table + local * COLUMNS + column, inside & is_here, other=0.0)
    if scale is not None:
        values = (values.to(tl.float32) * scale).to(values.dtype)
    tl.store(out + token * COLUMNS + column, values, inside)
