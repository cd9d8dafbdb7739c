"""Experts of many tokens: those of an expert are multiplied together, in tiles of them and of its outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.experts.gating import gated
from quire.kernels.experts.groups import group
from quire.kernels.experts.weights import Experts
from quire.kernels.gpu import Gpu, gpu_of
from quire.kernels.launch import dependent_launch

COMBINED = 1024  # columns that a program adds up
RESERVED = 4096  # bytes of shared memory, for what else a program keeps there


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: of tokens. outputs: columns of the result, of which the first product has twice as many.

    together: tiles of tokens that are multiplied by the same weights at about the same time, so that these
    come from memory once.
    """

    rows: int
    outputs: int
    columns: int
    warps: int
    stages: int
    together: int = 1

    def programs(self, pairs: int, experts: int, outputs: int) -> int:
        """Return how many programs there are, whichever experts are asked."""
        tiles = min(experts, pairs) + pairs // self.rows
        return triton.cdiv(tiles, self.together) * self.together * triton.cdiv(outputs, self.outputs)

    def fitting(self, weights: int, itemsize: int, shared_memory: int) -> Tile:
        """Return it with as few stages as there is shared memory for; `weights` are loaded at a time."""
        stage = (self.rows + weights * self.outputs) * self.columns * itemsize
        return replace(self, stages=max(min(self.stages, (shared_memory - RESERVED) // stage), 1))


@dataclass(frozen=True, slots=True)
class Tiles:
    up: Tile
    down: Tile


# Up to how many rows an expert has on average, and what is quick then: below 64 rows reading weights takes
# the time, above 64 the products do.
TILES: tuple[tuple[float, Tiles], ...] = (
    (8, Tiles(Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4))),
    (24, Tiles(Tile(32, 64, 64, 4, 4), Tile(32, 64, 128, 4, 4))),
    (96, Tiles(Tile(64, 64, 64, 4, 4, 4), Tile(64, 128, 64, 4, 4, 4))),
    (math.inf, Tiles(Tile(128, 128, 64, 8, 4, 8), Tile(128, 256, 64, 8, 3, 8))),
)


EXACT = Tiles(Tile(32, 32, 32, 4, 2), Tile(32, 32, 32, 4, 2))  # of fp32, which no tensor core multiplies


def tiles_of(pairs: int, experts: int, dtype: torch.dtype, gpu: Gpu) -> Tiles:
    """Return the tiles for so many pairs of a token and an expert."""
    tiles = next(tiles for most, tiles in TILES if pairs <= most * experts)
    tiles = EXACT if dtype == torch.float32 else tiles
    size, memory = dtype.itemsize, gpu.shared_memory
    return Tiles(tiles.up.fitting(2, size, memory), tiles.down.fitting(1, size, memory))


def grouped_experts(
    x: Tensor, index: Tensor, weights: Tensor, experts: Experts, tiles: Tiles | None = None
) -> Tensor:
    """Compute as `experts.experts` does."""
    (tokens, top), size = index.shape, index.numel()
    tiles = tiles or tiles_of(size, experts.count, x.dtype, gpu_of(x.device))
    pairs, counts = group(index, experts.count)
    padded = triton.next_power_of_2(experts.count)
    launch = dependent_launch(x.device)
    inner = torch.empty(size, experts.inner, dtype=x.dtype, device=x.device)
    up = tiles.up
    _up_kernel[(up.programs(size, experts.count, experts.inner),)](
        inner, x, pairs, counts, experts.gate_up, experts.gate_up_bias,
        x.stride(0), experts.gate_up.stride(0), experts.gate_up.stride(1), experts.alpha, experts.limit,
        TOP=top, EXPERTS=experts.count, PADDED=padded, INNER=experts.inner, COLUMNS=experts.hidden,
        INTERLEAVED=experts.interleaved, ACTIVATION=experts.activation,
        ROWS=up.rows, OUTPUTS=up.outputs, CHUNK=up.columns, TOGETHER=up.together,
        num_warps=up.warps, num_stages=up.stages, **launch,
    )  # fmt: skip
    parts = torch.empty(size, experts.hidden, dtype=x.dtype, device=x.device)
    down = tiles.down
    _down_kernel[(down.programs(size, experts.count, experts.hidden),)](
        parts, inner, pairs, counts, weights, experts.down, experts.down_bias,
        experts.down.stride(0), experts.down.stride(1),
        EXPERTS=experts.count, PADDED=padded, HIDDEN=experts.hidden, COLUMNS=experts.inner,
        ROWS=down.rows, OUTPUTS=down.outputs, CHUNK=down.columns, TOGETHER=down.together,
        num_warps=down.warps, num_stages=down.stages, **launch,
    )  # fmt: skip
    return combine(parts, tokens, top)


def combine(parts: Tensor, tokens: int, top: int) -> Tensor:
    """Add up each token's parts [tokens · top, H] in the order in which its experts were chosen."""
    hidden = parts.shape[1]
    out = torch.empty(tokens, hidden, dtype=parts.dtype, device=parts.device)
    _combine_kernel[(triton.cdiv(hidden, COMBINED), tokens)](
        out, parts, hidden, top, COMBINED, num_warps=4, **dependent_launch(parts.device)
    )
    return out


@triton.jit
def _places(OUTPUTS: tl.constexpr, TOGETHER: tl.constexpr) -> tl.tensor:
    """Return which tile of tokens a program has, and which of OUTPUTS tiles of outputs."""
    program = tl.program_id(0)
    within = program % (TOGETHER * OUTPUTS)
    return program // (TOGETHER * OUTPUTS) * TOGETHER + within % TOGETHER, within // TOGETHER


@triton.jit
def _tile(
    counts_ptr: tl.tensor,
    tile: tl.tensor,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Return a tile's expert, its first row, and how many rows it has: none past the last tile."""
    every = tl.arange(0, PADDED)
    counts = tl.load(counts_ptr + every, every < EXPERTS, other=0)
    tiles = (counts + (ROWS - 1)) // ROWS
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    earlier = every < expert
    within = (tile - tl.sum(tl.where(earlier, tiles, 0), 0)) * ROWS
    first = tl.sum(tl.where(earlier, counts, 0), 0) + within
    size = tl.minimum(tl.sum(tl.where(every == expert, counts, 0), 0) - within, ROWS)
    return expert, first, size


@triton.jit
def _up_kernel(
    inner_ptr: tl.tensor,
    x_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    x_stride: tl.tensor,
    expert_stride: tl.tensor,
    row_stride: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    TOP: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOGETHER: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    tile, place = _places((INNER + OUTPUTS - 1) // OUTPUTS, TOGETHER)
    expert, first, size = _tile(counts_ptr, tile, EXPERTS, PADDED, ROWS)
    if size <= 0:
        return
    inside = tl.arange(0, ROWS) < size
    row = first + tl.arange(0, ROWS)
    token = tl.load(pairs_ptr + row, inside, other=0) // TOP
    output = place * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < INNER
    gate_row = output * 2 if INTERLEAVED else output
    up_row = gate_row + 1 if INTERLEAVED else output + INNER
    column = tl.arange(0, CHUNK)
    x_place = x_ptr + token[:, None].to(tl.int64) * x_stride + column[None, :]
    weight = weight_ptr + expert.to(tl.int64) * expert_stride + column[:, None]
    gate_place = weight + gate_row[None, :].to(tl.int64) * row_stride
    up_place = weight + up_row[None, :].to(tl.int64) * row_stride
    gate_sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    up_sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, COLUMNS, CHUNK):
        if COLUMNS % CHUNK == 0:
            x_inside = inside[:, None]
            weight_inside = is_output[None, :]
        else:
            x_inside = inside[:, None] & (start + column < COLUMNS)[None, :]
            weight_inside = is_output[None, :] & (start + column < COLUMNS)[:, None]
        x = tl.load(x_place + start, x_inside, other=0.0)
        gate_part = tl.load(gate_place + start, weight_inside, other=0.0)
        up_part = tl.load(up_place + start, weight_inside, other=0.0)
        gate_sums = tl.dot(x, gate_part, gate_sums, input_precision="ieee")
        up_sums = tl.dot(x, up_part, up_sums, input_precision="ieee")
    if bias_ptr is not None:
        bias = bias_ptr + expert * (2 * INNER)
        gate_sums += tl.load(bias + gate_row, is_output, other=0.0).to(tl.float32)[None, :]
        up_sums += tl.load(bias + up_row, is_output, other=0.0).to(tl.float32)[None, :]
    result = gated(gate_sums, up_sums, alpha, limit, ACTIVATION)
    target = inner_ptr + row[:, None].to(tl.int64) * INNER + output[None, :]
    tl.store(target, result.to(inner_ptr.dtype.element_ty), inside[:, None] & is_output[None, :])


@triton.jit
def _down_kernel(
    parts_ptr: tl.tensor,
    inner_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    expert_stride: tl.tensor,
    row_stride: tl.tensor,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOGETHER: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Write each pair's part of its token's sum, in the order of tokens."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    tile, place = _places((HIDDEN + OUTPUTS - 1) // OUTPUTS, TOGETHER)
    expert, first, size = _tile(counts_ptr, tile, EXPERTS, PADDED, ROWS)
    if size <= 0:
        return
    inside = tl.arange(0, ROWS) < size
    row = first + tl.arange(0, ROWS)
    pair = tl.load(pairs_ptr + row, inside, other=0)
    output = place * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < HIDDEN
    column = tl.arange(0, CHUNK)
    inner_place = inner_ptr + row[:, None].to(tl.int64) * COLUMNS + column[None, :]
    weight_place = (
        weight_ptr
        + expert.to(tl.int64) * expert_stride
        + output[None, :].to(tl.int64) * row_stride
        + column[:, None]
    )
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, COLUMNS, CHUNK):
        if COLUMNS % CHUNK == 0:
            inner_inside = inside[:, None]
            weight_inside = is_output[None, :]
        else:
            inner_inside = inside[:, None] & (start + column < COLUMNS)[None, :]
            weight_inside = is_output[None, :] & (start + column < COLUMNS)[:, None]
        inner = tl.load(inner_place + start, inner_inside, other=0.0)
        part = tl.load(weight_place + start, weight_inside, other=0.0)
        sums = tl.dot(inner, part, sums, input_precision="ieee")
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * HIDDEN + output, is_output, other=0.0)
        sums += bias.to(tl.float32)[None, :]
    sums *= tl.load(weights_ptr + pair, inside, other=0.0).to(tl.float32)[:, None]
    target = parts_ptr + pair[:, None].to(tl.int64) * HIDDEN + output[None, :]
    tl.store(target, sums.to(parts_ptr.dtype.element_ty), inside[:, None] & is_output[None, :])


@triton.jit
def _combine_kernel(
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Add up a token's parts in the order in which its experts were chosen."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP):
        part = tl.load(parts_ptr + (token * TOP + place) * HIDDEN + column, inside, other=0.0)
        total += part.to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + column, total.to(out_ptr.dtype.element_ty), inside)
