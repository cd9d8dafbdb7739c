"""Linear layers of up to a few hundred tokens for Hopper, whose weights are asked for ahead.

In Gluon, Triton's lower level. So many tokens wait for the memory. So a program fills stages of shared memory
with weights by the copy engine (TMA) before the kernel ahead has ended, that the memory has work between two
kernels; what it multiplies them with follows when that has. Long sums are divided among programs, whose parts
`pointwise.norm` adds up together with the residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.gpu import Gpu, gpu_of
from quire.kernels.pointwise.activation import Activation, activate

WIDE = 1 << 24  # elements of a weight from which reading it is most of the time, and must not happen twice
MIDDLE = 1 << 23  # from which that is so of up to 64 tokens
ITEMSIZE = 2
SHARED = 192 * 1024  # bytes of stages, as many as leave a program the multiprocessor for itself
PAIRED = 109 * 1024  # that two programs on one have
FULL = 128  # programs: about one on every multiprocessor
BUSY = 96  # programs below which smaller tiles are quicker
MULTIPROCESSORS = 132
WARPGROUP = gl.constexpr(64)  # rows of a tile that the tensor cores multiply at least
CHUNK = 128  # columns: what a row gives at a time
MOST_SPLITS = 4
EVEN = 0.8  # of the multiprocessors' time: programs of many tokens that fill less in several rounds are slow
WHOLE = 241  # tokens from which a tile of 256 wastes less than it gains


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("w_source",))


@gluon.jit
def ask_for_weights(
    source: tma.tensor_descriptor, tile: gl.shared_memory_descriptor, full: gl.shared_memory_descriptor,
    row: gl.tensor, up_rows: gl.tensor, column: gl.tensor, needed: gl.tensor, GATED: gl.constexpr,
    ROWS: gl.constexpr,
) -> None:  # fmt: skip
    """Ask for a chunk of ROWS rows, or of half as many of the gate's and, `up_rows` further, of the up's."""
    if GATED:
        HALF: gl.constexpr = ROWS // 2
        gate, up = tile.slice(0, HALF), tile.slice(HALF, HALF)
        tma.async_copy_global_to_shared(source, [row, column], full, gate, pred=needed)
        tma.async_copy_global_to_shared(source, [up_rows + row, column], full, up, pred=needed)
    else:
        tma.async_copy_global_to_shared(source, [row, column], full, tile, pred=needed)


@gluon.jit
def gated_halves(sums: gl.tensor, dtype: gl.constexpr, KIND: gl.constexpr) -> gl.tensor:
    """Compute fp32 sums [T, 2N] -> activation(gate) · up [T, N], rounded where unfused layers round."""
    HALF: gl.constexpr = sums.shape[1] // 2
    gate, up = gl.split(sums.reshape([sums.shape[0], 2, HALF]).permute((0, 2, 1)))
    gate = gate.to(dtype).to(gl.float32)
    activated = gate / (1.0 + gl.exp(-gate)) if KIND == "silu" else activate(gate, KIND)
    return (activated.to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)).to(dtype)


@gluon.jit(do_not_specialize=["num_tokens", "splits"])
def _kernel(
    out: gl.tensor, x_source: tma.tensor_descriptor, w_source: tma.tensor_descriptor, bias: gl.tensor,
    num_tokens: gl.tensor, outputs: gl.tensor, columns: gl.tensor, splits: gl.tensor,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    KIND: gl.constexpr,
) -> None:  # fmt: skip
    """Multiply TOKENS tokens by ROWS rows of the weight; an `out` in fp32 is of parts of the sums.

    The tensor cores' first operand has 64 rows or more: fewer tokens are the second one.
    """
    WARPS: gl.constexpr = gl.num_warps()
    FEW: gl.constexpr = TOKENS < WARPGROUP
    SHARED_TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS if FEW else ROWS, 16])
    BYTES: gl.constexpr = (TOKENS + ROWS) * CHUNK * 2
    OUT_ROWS: gl.constexpr = ROWS // 2 if GATED else ROWS
    first_token = gl.program_id(0) * TOKENS  # who reads the same weights runs at the same time
    first_row = gl.program_id(1) * OUT_ROWS
    split = gl.program_id(2)
    all_chunks = columns // CHUNK
    first_chunk = split * all_chunks // splits
    chunks = (split + 1) * all_chunks // splits - first_chunk

    dtype: gl.constexpr = x_source.dtype
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, CHUNK], SHARED_TILE)
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, CHUNK], SHARED_TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
    fence_async_shared()
    for stage in gl.static_range(STAGES):
        mbarrier.expect(full.index(stage), BYTES, pred=stage < chunks)
        ask_for_weights(
            w_source, w_tiles.index(stage), full.index(stage), first_row, outputs,
            (first_chunk + stage) * CHUNK, stage < chunks, GATED, ROWS,
        )  # fmt: skip
    gdc_launch_dependents()
    gdc_wait()  # from here on what earlier kernels wrote may be read, and their inputs written
    for stage in gl.static_range(STAGES):
        place = [first_token, (first_chunk + stage) * CHUNK]
        tma.async_copy_global_to_shared(
            x_source, place, full.index(stage), x_tiles.index(stage), pred=stage < chunks
        )

    acc = gl.zeros([ROWS, TOKENS] if FEW else [TOKENS, ROWS], gl.float32, SUMS)
    for step in range(chunks):
        now = step % STAGES
        mbarrier.wait(full.index(now), step // STAGES & 1)
        if FEW:
            acc = warpgroup_mma(w_tiles.index(now), x_tiles.index(now).permute((1, 0)), acc, is_async=True)
        else:
            acc = warpgroup_mma(x_tiles.index(now), w_tiles.index(now).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        # The product before this one is done: its stage is filled again.
        ahead = step - 1 + STAGES
        free = ahead % STAGES
        needed = (step > 0) & (ahead < chunks)
        column = (first_chunk + ahead) * CHUNK
        mbarrier.expect(full.index(free), BYTES, pred=needed)
        tma.async_copy_global_to_shared(
            x_source, [first_token, column], full.index(free), x_tiles.index(free), pred=needed
        )
        ask_for_weights(
            w_source, w_tiles.index(free), full.index(free), first_row, outputs, column, needed, GATED, ROWS
        )
    acc = warpgroup_mma_wait(0, deps=(acc,))

    PARTS: gl.constexpr = out.dtype.element_ty == gl.float32
    if bias is not None:
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1 if FEW else 0, SUMS))
        added = gl.load(bias + row).to(gl.float32)
        acc += added[:, None] if FEW else added[None, :]
    if FEW:
        acc = acc.permute((1, 0))
    if PARTS:
        result = acc
    elif GATED:
        result = gated_halves(acc, dtype, KIND)
    else:
        result = acc.to(dtype)
    # A token's results next to each other, to be written 16 bytes at a time.
    HELD: gl.constexpr = 4 if PARTS else 8
    LINE: gl.constexpr = min(OUT_ROWS // HELD, 32)
    WRITTEN: gl.constexpr = gl.BlockedLayout([1, HELD], [32 // LINE, LINE], [WARPS, 1], [1, 0])
    row = first_row + gl.arange(0, OUT_ROWS, gl.SliceLayout(0, WRITTEN))
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(1, WRITTEN))
    place = (split * num_tokens + token).to(gl.int64) * outputs
    result = gl.convert_layout(result, WRITTEN)
    gl.store(out + place[:, None] + row[None, :], result, mask=(token < num_tokens)[:, None])


@dataclass(frozen=True, slots=True)
class Tiling:
    """What a program multiplies: `tokens` times `rows` of the weight, `chunk` columns at a time.

    `stages` chunks are in shared memory at a time, and `splits` programs share a sum.
    """

    tokens: int
    rows: int
    chunk: int
    stages: int
    splits: int

    def programs(self, count: int, outputs: int) -> int:
        """Return how many programs `count` tokens of so many outputs take, unless they are gated."""
        return triton.cdiv(count, self.tokens) * (outputs // self.rows) * self.splits


def tiling(count: int, outputs: int, columns: int, *, gated: bool, divided: bool) -> Tiling | None:
    """Return how `count` tokens and a weight [outputs, columns] are divided; None where cuBLAS does better.

    As measured within the layers of Qwen3-0.6B and Llama-3.1-8B on an H100, and of other models' weights
    alone (loadtest/results/tilings.json). `gated` is a gate and an up projection, `divided` what may be parts
    of sums.
    """
    wide = outputs * columns >= WIDE
    middle = not (wide or gated) and outputs * columns >= MIDDLE and count <= 64
    whole = wide and gated and WHOLE <= count <= 256
    if not (whole or 1 <= count <= ((64 if divided else 128) if wide else 256)) or columns % CHUNK:
        return None
    large = (count > 64) if wide else (gated and count > 128)
    tokens = 256 if whole else 128 if large else 64
    chunk = CHUNK // 2 if large and (whole or not wide) else CHUNK
    most = 64 if divided else 128
    # Fewer tokens leave room for more weights on their way, and what a tile has of none takes the copy engine
    # long: in tiles of 64 tokens, 8 and [1152, 6912] take an H200 14 µs instead of 7.
    few = count <= 32 and (count <= 16 or outputs // most >= BUSY if gated else outputs % 64 == 0)
    if (wide or few) and not (gated and outputs % most):
        tokens = min(tokens, max(triton.next_power_of_2(count), 16))
    # A warp has both a gate and its up.
    least = most if tokens < 64 and gated else 64 if wide or tokens < 64 else 32
    times = triton.cdiv(count, tokens)
    most_splits = MOST_SPLITS if divided else 1
    fitting = [rows for rows in (32, 64, 128) if least <= rows <= most and outputs % rows == 0]
    busy = [rows for rows in fitting if outputs // rows * times * most_splits >= BUSY]
    if not fitting or (wide and large and 128 not in busy):
        return None
    rows = max(busy, default=fitting[0])
    programs = outputs // rows * times
    uneven = programs > MULTIPROCESSORS and _filled(programs) < EVEN
    if uneven and count > 128:  # these wait for products: 140 programs take as long as 264
        rows = min((each for each in fitting if outputs // each * times <= MULTIPROCESSORS), default=0)
        if large or not rows:
            return None
        programs = outputs // rows * times
    paired = uneven and large and programs <= 2 * MULTIPROCESSORS
    chunk = CHUNK // 2 if paired else chunk
    splits = min(max(FULL // programs, 1), most_splits)
    chunks, size = columns // chunk, (tokens + rows) * chunk * ITEMSIZE
    doubled = divided and times == 1 and (programs * splits < BUSY or (middle and tokens < 64))
    if doubled:
        splits = min(max(2 * FULL // programs, 1), most_splits)
    else:  # what a program holds at once is not divided further, if enough of them read
        splits = min(splits, max(triton.cdiv(chunks, SHARED // size), triton.cdiv(FULL // 2, programs)))
    splits = min(splits, chunks)
    alone = programs * splits <= MULTIPROCESSORS
    if paired:
        shared = SHARED // 2  # two on each, that nobody waits for the few beyond
    elif gated and tokens == 16 and MULTIPROCESSORS < programs <= MULTIPROCESSORS * 5 // 4:
        shared = PAIRED  # lest the few that find no multiprocessor of their own begin when the others end
    elif alone or large or (wide and not doubled):
        shared = SHARED
    else:
        shared = SHARED // 2  # two on each
    crowded = tokens == 64 and not (alone or wide or large or middle)
    stages = min(4 if crowded else shared // size, max(triton.cdiv(chunks, splits), 2))
    return Tiling(tokens, rows, chunk, stages, splits)


def _filled(programs: int) -> float:
    """Return the share of their time for which multiprocessors have a program, if each has one at a time."""
    return programs / (triton.cdiv(programs, MULTIPROCESSORS) * MULTIPROCESSORS)


def warps_of(tiles: Tiling) -> int:
    """Return a warpgroup's four warps for every 64 tokens, one for fewer, and two for 256."""
    return min(max(tiles.tokens // 16, 4), 8)


def supports(gpu: Gpu, dtype: torch.dtype) -> bool:
    """Tell whether the functions here take tokens and a weight of dtype, all contiguous."""
    return gpu.has_warpgroup_products and dtype.itemsize == ITEMSIZE


def suits_hopper_linear(x: Tensor, weight: Tensor) -> bool:
    """Tell whether x [T, K] and weight [N, K] are what the functions here take."""
    return (
        supports(gpu_of(x.device), x.dtype)
        and x.dtype == weight.dtype
        and len(x) > 0
        and x.is_contiguous()
        and weight.is_contiguous()
    )


def hopper_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiling) -> Tensor:
    """Multiply x [T, K] by weight [N, K], plus bias [N] or None -> [T, N]."""
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    _launch(out, x, weight, bias, tiles, gated=False)
    return out


def hopper_gated_linear(x: Tensor, weight: Tensor, tiles: Tiling, activation: Activation) -> Tensor:
    """Multiply x [T, K] by a gate and an up projection, weight [2I, K] -> activation(gate) · up [T, I]."""
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    _launch(out, x, weight, None, tiles, gated=True, activation=activation)
    return out


def hopper_linear_parts(x: Tensor, weight: Tensor, tiles: Tiling) -> Tensor:
    """Multiply x [T, K] by weight [N, K] -> fp32 [splits, T, N], sums over a part of the columns each."""
    out = torch.empty(tiles.splits, len(x), len(weight), dtype=torch.float32, device=x.device)
    _launch(out, x, weight, None, tiles, gated=False)
    return out


def _launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiles: Tiling,
    *,
    gated: bool,
    activation: Activation | None = None,
) -> None:
    (count, columns), outputs = x.shape, out.shape[-1]
    box = tiles.rows // 2 if gated else tiles.rows
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    x_source = TensorDescriptor(x, list(x.shape), [columns, 1], [tiles.tokens, tiles.chunk], layout)
    w_source = TensorDescriptor(weight, list(weight.shape), [columns, 1], [box, tiles.chunk], layout)
    _kernel[triton.cdiv(count, tiles.tokens), outputs // box, tiles.splits](
        out, x_source, w_source, bias, count, outputs, columns, tiles.splits,
        TOKENS=tiles.tokens, ROWS=tiles.rows, CHUNK=tiles.chunk, STAGES=tiles.stages, GATED=gated,
        KIND=activation, num_warps=warps_of(tiles), launch_pdl=True,
    )  # fmt: skip
