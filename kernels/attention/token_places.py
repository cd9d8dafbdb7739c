"""What a forward pass needs to know of each of its tokens before the first layer: which it is, and where."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from quire.kernels.attention.block_tables import stacked
from quire.kernels.launch import dependent_launch

BLOCK = 256  # tokens of a program


def token_places(
    given: Tensor | None,
    rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    block_tables: Sequence[Tensor],
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [T] i32, positions [T] i32 and cache slots [G, T] i64, of each cache group.

    given [T] i32: token ids, negative for the last one that the token's row sampled; None: all are. rows [T]
    i32, positions [T] i32 (-1 pads: position 0, slot -1), last_tokens [*] i32 and block_tables
    of each group [*, max_blocks] i32, one behind the other, by row. A slot is block · block_size + offset.
    """
    tables = stacked(block_tables)
    count, groups = rows.shape[0], len(tables)
    tokens, places = (torch.empty(count, dtype=torch.int32, device=rows.device) for _ in range(2))
    # Of each group from where kernels read 16 bytes at once.
    slots = torch.empty(groups, count + count % 2, dtype=torch.int64, device=rows.device)
    # Not launched dependently: the kernels of the layers read its results before kernels ahead have ended.
    # The one behind it may begin: it waits before it lets others begin, as the embedding's does, or is not
    # launched dependently either, as torch's are and those of shared prefixes.
    token_places_kernel[triton.cdiv(count, BLOCK), groups](
        given, rows, positions, last_tokens, tables, tokens, places, slots,
        count, tables.stride(1), tables.stride(0), slots.stride(0), block_size, BLOCK,
        DEPENDENTS=dependent_launch(rows.device)["DEPENDENT"], num_warps=4,
    )  # fmt: skip
    return tokens, places, slots[:, :count]


def token_places_reference(
    given: Tensor | None,
    rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    block_tables: Sequence[Tensor],
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same as `token_places` in plain torch."""
    tokens = last_tokens[rows]
    if given is not None:
        tokens = torch.where(given < 0, tokens, given)
    places = positions.clamp(min=0)
    blocks = torch.stack([table[rows, places // block_size] for table in block_tables]).long()
    return tokens, places, torch.where(positions < 0, -1, blocks * block_size + places % block_size)


@triton.jit(do_not_specialize=["count", "slots_stride"])
def token_places_kernel(
    given_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    places_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    count: tl.tensor,
    table_stride: tl.tensor,
    group_stride: tl.tensor,
    slots_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENTS: tl.constexpr,
) -> None:
    if DEPENDENTS:
        gdc_launch_dependents()
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1).to(tl.int64)
    inside = token < count
    row = tl.load(rows_ptr + token, inside, other=0)
    position = tl.load(positions_ptr + token, inside, other=-1)
    token_id = tl.load(last_tokens_ptr + row, inside, other=0)
    if given_ptr is not None:
        given = tl.load(given_ptr + token, inside, other=0)
        token_id = tl.where(given < 0, token_id, given)
    place = tl.maximum(position, 0)
    table = block_tables_ptr + group * group_stride
    entry = table + row.to(tl.int64) * table_stride + place // BLOCK_SIZE
    block = tl.load(entry, inside & (position >= 0), other=0).to(tl.int64)
    slot = tl.where(position < 0, -1, block * BLOCK_SIZE + place % BLOCK_SIZE)
    tl.store(slots_ptr + group * slots_stride + token, slot, inside)
    if group == 0:
        tl.store(tokens_ptr + token, token_id, inside)
        tl.store(places_ptr + token, place, inside)
