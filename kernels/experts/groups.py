"""Pairs of a token and an expert in the order of experts, sorted by counting: the same order every time."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch

MOST_COMPARED = 1 << 14  # pairs of a program times experts, which it compares with each other
COUNTED = 16  # programs whose counts one adds up at a time


class Groups(NamedTuple):
    """pairs [S] i32, those of an expert beside each other, each as token · top + place; counts [E] i32."""

    pairs: Tensor
    counts: Tensor


def group(index: Tensor, experts: int) -> Groups:
    """Sort the pairs of index [T, top] by their experts; those of one keep their order."""
    size, device = index.numel(), index.device
    padded = triton.next_power_of_2(experts)
    block = min(max(MOST_COMPARED // padded, 16), 128)
    blocks = triton.cdiv(size, block)
    pairs = torch.empty(size, dtype=torch.int32, device=device)
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    by_block = torch.empty(blocks, padded, dtype=torch.int32, device=device)
    launch = dependent_launch(device)
    if blocks > 1:
        _count_kernel[(blocks,)](index, by_block, size, block, padded, num_warps=4, **launch)
    _place_kernel[(blocks,)](
        index, by_block, pairs, counts, size, blocks, experts, block, padded, blocks == 1, COUNTED,
        num_warps=4, **launch,
    )  # fmt: skip
    return Groups(pairs, counts)


@triton.jit(do_not_specialize=["size"])
def _count_kernel(
    index_ptr: tl.tensor,
    by_block_ptr: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(index_ptr + pair, pair < size, other=-1).to(tl.int32)
    every = tl.arange(0, EXPERTS)
    counts = tl.sum((expert[:, None] == every[None, :]).to(tl.int32), 0)
    tl.store(by_block_ptr + block * EXPERTS + every, counts)


@triton.jit(do_not_specialize=["size", "blocks"])
def _place_kernel(
    index_ptr: tl.tensor,
    by_block_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    size: tl.tensor,
    blocks: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALONE: tl.constexpr,
    COUNTED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Put a block's pairs behind those of smaller experts, and of the same expert in blocks before it."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    pair = block * BLOCK + place
    expert = tl.load(index_ptr + pair, pair < size, other=-1).to(tl.int32)
    every = tl.arange(0, EXPERTS)
    is_of = expert[:, None] == every[None, :]
    before = tl.zeros([EXPERTS], tl.int32)
    if ALONE:
        counts = tl.sum(is_of.to(tl.int32), 0)
    else:
        counts = tl.zeros([EXPERTS], tl.int32)
        for first in range(0, blocks, COUNTED):
            other = first + tl.arange(0, COUNTED)
            source = by_block_ptr + other[:, None] * EXPERTS + every[None, :]
            part = tl.load(source, (other < blocks)[:, None], other=0)
            counts += tl.sum(part, 0)
            before += tl.sum(tl.where((other < block)[:, None], part, 0), 0)
    begin = tl.cumsum(counts, 0) - counts + before
    same = (expert[:, None] == expert[None, :]) & (place[None, :] < place[:, None])
    behind = tl.sum(same.to(tl.int32), 1)
    target = tl.sum(tl.where(is_of, begin[None, :], 0), 1) + behind
    tl.store(pairs_ptr + target, pair, pair < size)
    if block == 0:
        tl.store(counts_ptr + every, counts, every < count)
