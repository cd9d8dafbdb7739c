"""Products of many tokens for Hopper, with what follows a product: silu of a gate, or adding to a residual.

In Gluon, Triton's lower level. A program stays on a multiprocessor and takes one tile of the result after the
other. A producer of one warp has the copy engine (TMA) bring tokens and weights into stages of shared memory,
on into the next tile's while two consumers of four warps finish the last. Each consumer multiplies half of a
tile's tokens. So many products draw all the power a GPU may have, and its clock falls: what is not moved
through memory makes the products themselves quicker, too.
"""

from __future__ import annotations

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

from quire.kernels.gpu import Gpu, gpu_of
from quire.kernels.linear import hopper_stream
from quire.kernels.linear.hopper_stream import gated_halves, suits_hopper_linear
from quire.kernels.linear.linear import Matrix

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # tokens of a consumer: what one wgmma takes
TOKENS = gl.constexpr(128)  # of a tile
WEIGHTS = gl.constexpr(256)  # rows of the weight that a tile is multiplied with
CHUNK = gl.constexpr(64)  # columns: a swizzled line of shared memory, 128 bytes
MOST_BANDED = 12  # tiles of tokens that stay in the L2 cache while weights go by
STAGES, STAGES_OF_GATED = 3, 4  # what shared memory holds beside a tile of the result
# Columns whose sums take as long as writing or reading one result of 16 bits: by what is not written or read
# again, a product here gains on cuBLAS, and may leave as many more multiprocessors idle in its last round.
COLUMNS_OF_A_RESULT = 175


@gluon.jit
def _place_of(
    tile: gl.tensor, token_tiles: gl.tensor, output_tiles: gl.tensor, banded: gl.tensor
) -> gl.tuple:
    """Return a tile's token tile and output tile: bands of `banded` token tiles, the outputs along them."""
    first = tile // (banded * output_tiles) * banded
    height = gl.minimum(token_tiles - first, banded)
    within = tile - first * output_tiles
    return first + within % height, within // height


@gluon.jit
def _consume(
    out: tma.tensor_descriptor, shared: gl.tuple, work: gl.tuple,
    CONSUMER: gl.constexpr, GATED: gl.constexpr, ADDED: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Compute ROWS tokens of each of the program's tiles."""
    x_tiles, w_tiles, out_tiles, full, free, added_full = shared
    token_tiles, output_tiles, chunks, banded = work
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WEIGHTS, 16])
    WIDTH: gl.constexpr = WEIGHTS // 2 if GATED else WEIGHTS
    dtype: gl.constexpr = out.dtype
    mine = out_tiles.index(CONSUMER)
    acc = gl.zeros([ROWS, WEIGHTS], gl.float32, SUMS)
    stage, phase, added_phase = 0, 0, 0
    for tile in range(gl.program_id(0), token_tiles * output_tiles, gl.num_programs(0)):
        token_tile, output_tile = _place_of(tile, token_tiles, output_tiles, banded)
        for chunk in range(chunks):
            mbarrier.wait(full.index(stage), phase)
            x = x_tiles.index(stage * CONSUMERS + CONSUMER)
            w = w_tiles.index(stage).permute((1, 0))
            acc = warpgroup_mma(x, w, acc, use_acc=chunk > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            if chunk == 1:
                tma.store_wait(0)  # the tile's before has left `mine`, which its producer hears of, too
            # The product before this one is done: its stage may be filled again.
            mbarrier.arrive(free.index((stage + STAGES - 1) % STAGES), pred=chunk > 0)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index((stage + STAGES - 1) % STAGES))

        if GATED:
            result = gated_halves(acc, dtype, "silu")
        elif ADDED:  # rounded where the unfused sum rounds
            mbarrier.wait(added_full, added_phase)
            added_phase ^= 1
            result = (acc.to(dtype).to(gl.float32) + mine.load(SUMS).to(gl.float32)).to(dtype)
        else:
            result = acc.to(dtype)
        mine.store(result)
        fence_async_shared()
        place = [token_tile * TOKENS + CONSUMER * ROWS, output_tile * WIDTH]
        tma.async_copy_shared_to_global(out, place, mine)
    tma.store_wait(0)


@gluon.jit
def _produce(
    out: tma.tensor_descriptor, x_source: tma.tensor_descriptor, w_source: tma.tensor_descriptor,
    shared: gl.tuple, work: gl.tuple, up_rows: gl.tensor,
    GATED: gl.constexpr, ADDED: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Fill the stages in turn, and once a tile what its result is added to."""
    x_tiles, w_tiles, out_tiles, full, free, added_full = shared
    token_tiles, output_tiles, chunks, banded = work
    WIDTH: gl.constexpr = WEIGHTS // 2 if GATED else WEIGHTS
    stage, phase = 0, 1
    for tile in range(gl.program_id(0), token_tiles * output_tiles, gl.num_programs(0)):
        token_tile, output_tile = _place_of(tile, token_tiles, output_tiles, banded)
        token, row = token_tile * TOKENS, output_tile * WIDTH
        for chunk in range(chunks):
            mbarrier.wait(free.index(stage), phase)
            filled = full.index(stage)
            mbarrier.expect(filled, (TOKENS + WEIGHTS) * CHUNK * 2)
            for half in gl.static_range(CONSUMERS):
                into = x_tiles.index(stage * CONSUMERS + half)
                tma.async_copy_global_to_shared(x_source, [token + half * ROWS, chunk * CHUNK], filled, into)
            w = w_tiles.index(stage)
            if GATED:
                tma.async_copy_global_to_shared(w_source, [row, chunk * CHUNK], filled, w.slice(0, WIDTH))
                up = w.slice(WIDTH, WIDTH)
                tma.async_copy_global_to_shared(w_source, [up_rows + row, chunk * CHUNK], filled, up)
            else:
                tma.async_copy_global_to_shared(w_source, [row, chunk * CHUNK], filled, w)
            if ADDED:
                # Both consumers have multiplied a chunk of this tile, so the last one's result has left.
                now = chunk == STAGES
                mbarrier.expect(added_full, TOKENS * WIDTH * 2, pred=now)
                for half in gl.static_range(CONSUMERS):
                    place = [token + half * ROWS, row]
                    tma.async_copy_global_to_shared(out, place, added_full, out_tiles.index(half), pred=now)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit(do_not_specialize=["num_tokens", "banded"])
def _kernel(
    out: tma.tensor_descriptor, x_source: tma.tensor_descriptor, w_source: tma.tensor_descriptor,
    num_tokens: gl.tensor, outputs: gl.tensor, columns: gl.tensor, banded: gl.tensor,
    GATED: gl.constexpr, ADDED: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Tiles of TOKENS tokens times WEIGHTS rows of the weight, one program after the other in turn."""
    WIDTH: gl.constexpr = WEIGHTS // 2 if GATED else WEIGHTS
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = out.dtype
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, ROWS, CHUNK], SHARED)
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES, WEIGHTS, CHUNK], SHARED)
    out_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, WIDTH], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    added_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(free.index(stage), CONSUMERS)
    mbarrier.init(added_full, 1)
    fence_async_shared()
    shared = (x_tiles, w_tiles, out_tiles, full, free, added_full)
    work = (gl.cdiv(num_tokens, TOKENS), outputs // WIDTH, columns // CHUNK, banded)
    gl.warp_specialize(
        [
            (_consume, (out, shared, work, 0, GATED, ADDED, STAGES)),
            (_consume, (out, shared, work, 1, GATED, ADDED, STAGES)),
            (_produce, (out, x_source, w_source, shared, work, outputs, GATED, ADDED, STAGES)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


def takes(outputs: int, columns: int) -> bool:
    """Tell whether tiles divide a weight [outputs, columns], with more chunks than stages each.

    What a tile is added to is asked for with the first chunk for which a stage had to become free.
    """
    return (
        outputs % WEIGHTS.value == 0
        and columns % CHUNK.value == 0
        and columns // CHUNK.value > max(STAGES, STAGES_OF_GATED)
    )


def is_quick(count: int, outputs: int, columns: int, multiprocessors: int, *, spared: int) -> bool:
    """Tell whether `count` tokens times a weight [outputs, columns] are no slower here than by cuBLAS.

    As measured within the layers of Qwen3-0.6B and Llama-3.1-8B on an H100: they are where tiles fill all
    multiprocessors in each round, and where `spared` writes or reads of each output make up for those that
    do not.
    """
    output_tiles = outputs // WEIGHTS.value
    rounds = triton.cdiv(triton.cdiv(count, TOKENS.value) * output_tiles, multiprocessors)
    busy = count / TOKENS.value * output_tiles
    return busy * (1 + spared * COLUMNS_OF_A_RESULT / columns) >= rounds * multiprocessors


def supports(gpu: Gpu, dtype: torch.dtype, weight: Matrix) -> bool:
    """Tell whether the functions here take a weight and tokens of dtype."""
    streams = hopper_stream.supports(gpu, dtype)
    return streams and not weight.biased and takes(weight.outputs, weight.inputs)


def hopper_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [T, K] by weight [N, K] -> [T, N]."""
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    _launch(out, x, weight, gated=False, added=False)
    return out


def hopper_matmul_silu(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [T, K] by a gate and an up projection, weight [2I, K], then silu(gate) · up -> [T, I]."""
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    _launch(out, x, weight, gated=True, added=False)
    return out


def hopper_matmul_add(residual: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add x [T, K] times weight [N, K], rounded to its dtype, to residual [T, N] in place."""
    _launch(residual, x, weight, gated=False, added=True)


def launch_each(device: torch.device, dtype: torch.dtype) -> None:
    """Launch each kernel here, on little, where a device and a type have them.

    Which of them a step takes depends on its exact count of tokens, so a rehearsal asks for all.
    """
    x, weight = (torch.zeros(rows, 512, dtype=dtype, device=device) for rows in (TOKENS.value, WEIGHTS.value))
    if suits_hopper_linear(x, weight):
        hopper_matmul_silu(x, weight)
        hopper_matmul_add(hopper_matmul(x, weight), x, weight)


def _launch(out: Tensor, x: Tensor, weight: Tensor, *, gated: bool, added: bool) -> None:
    (count, columns), outputs = x.shape, out.shape[1]
    rows, chunk = ROWS.value, CHUNK.value
    width = WEIGHTS.value // 2 if gated else WEIGHTS.value
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    token_tiles = triton.cdiv(count, TOKENS.value)
    banded = triton.cdiv(token_tiles, triton.cdiv(token_tiles, MOST_BANDED))  # bands as even as can be
    tiles = token_tiles * (outputs // width)
    _kernel[(min(tiles, gpu_of(x.device).multiprocessors),)](
        TensorDescriptor(out, list(out.shape), [outputs, 1], [rows, width], layout),
        TensorDescriptor(x, list(x.shape), [columns, 1], [rows, chunk], layout),
        TensorDescriptor(weight, list(weight.shape), [columns, 1], [width, chunk], layout),
        count, outputs, columns, banded,
        GATED=gated, ADDED=added, STAGES=STAGES_OF_GATED if gated else STAGES, num_warps=4,
    )  # fmt: skip
