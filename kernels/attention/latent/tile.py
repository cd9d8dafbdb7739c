"""A tile of consecutive latents of one sequence, and what a program of queries takes in with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention.batch import AttentionLayer
from quire.kernels.attention.key_tiles import LEAST_KEYS, SPARE_BYTES, WARPGROUP_LANES
from quire.kernels.attention.kv_tile import BLOCK_SIZES, attend_by_scores
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import Gpu

LEAST_DIM = 16  # of a product
MOST_LANES = 64  # queries of a program
MOST_KEYS = 32  # of a tile, but where `_takes_wide_tiles`
WIDE_KEYS, WIDE_WARPS = 64, 8
MOST_STAGES = 3


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """lanes: queries of a program, which are of `group` heads. keys and stages as `KeyTiles` has them.

    dim, rest_dim: of a latent's value, and of what is behind it, padded.
    """

    lanes: int
    group: int
    keys: int
    stages: int
    warps: int
    dim: int
    rest_dim: int

    def head_blocks(self, heads: int) -> int:
        """Return how many programs so many heads take."""
        return triton.cdiv(heads, self.group)


def latent_tiles(
    gpu: Gpu, heads: int, rows: int, width: int, latent: int, dtype: torch.dtype, *, few: bool = False
) -> LatentTiles:
    """Return the tiles of programs that attend with `heads` of `rows` tokens each to latents [width].

    few: each program has a multiprocessor for itself. Raises ValueError where no tile fits.
    """
    dim = max(LEAST_DIM, triton.next_power_of_2(latent))
    rest_dim = max(LEAST_DIM, triton.next_power_of_2(width - latent))
    vector = (dim + rest_dim) * dtype.itemsize
    lanes = min(max(LEAST_DIM, triton.next_power_of_2(heads * rows)), MOST_LANES)
    while lanes >= LEAST_DIM:
        group = triton.cdiv(heads, triton.cdiv(heads, lanes))  # heads of equal parts
        keys = WIDE_KEYS if _takes_wide_tiles(gpu, lanes, dtype, few) else MOST_KEYS
        while keys >= LEAST_KEYS:
            fixed = lanes * (vector + keys * dtype.itemsize) + SPARE_BYTES
            products = gpu.has_products_of_shared_memory and lanes >= WARPGROUP_LANES
            if products or dtype.itemsize == 4:
                fixed += keys * vector  # of the tile in use
            if products and not gpu.has_warpgroup_products:  # on Blackwell it is there for either product
                fixed += 2 * keys * vector
            stages = min(1 + (gpu.shared_memory - fixed) // (keys * vector), MOST_STAGES)
            if stages >= (2 if lanes > LEAST_DIM or keys > LEAST_KEYS else 1):
                warps = WIDE_WARPS if few and keys == WIDE_KEYS else max(4, lanes * dim // 4096)
                return LatentTiles(lanes, group, keys, stages, warps, dim, rest_dim)
            keys //= 2
        lanes //= 2
    raise ValueError(
        f"{gpu.name} has {gpu.shared_memory} bytes of shared memory for a program, too few to attend to "
        f"latents of {width} numbers in {dtype}"
    )


def _takes_wide_tiles(gpu: Gpu, lanes: int, dtype: torch.dtype, few: bool) -> bool:
    """Tell whether a tile has WIDE_KEYS, as far as measured: on Hopper, of 512 + 64 numbers of 16 bits.

    A prompt of 8,192 tokens takes 4.32 ms instead of 5.56 with 16 heads, and 35.3 instead of 43.8 with 128;
    256 decodes at 4,096 with 128 heads 1.30 instead of 1.39, and one at 32,768 with 16 heads 32 µs instead of
    38. With two programs on a multiprocessor 16 lanes are quicker with few keys and four warps.
    """
    measured = gpu.has_warpgroup_products and dtype.itemsize == 2
    return measured and (few or lanes >= WARPGROUP_LANES)


def check_latent_inputs(q: Tensor, out: Tensor, layer: AttentionLayer, cache: LayerCache) -> None:
    """Raise ValueError unless q [T, Hq, D], out [T, Hq, Dv] and the cache suit the kernels."""
    cache.check()
    kv = cache.kv
    width = kv.shape[-1]
    if kv.shape[1:3] != (1, 1) or not 0 < cache.latent < width or cache.latent != layer.latent:
        raise ValueError(
            f"a cache of {tuple(kv.shape)} with latents of {cache.latent} of a layer's {layer.latent} is "
            "none of one latent a token, with more behind its value"
        )
    if cache.block_size not in BLOCK_SIZES:
        raise ValueError(f"block size {cache.block_size} is not supported; use one of {BLOCK_SIZES}")
    if q.shape[2] != width or q.stride()[1:] != (width, 1) or kv.stride(-1) != 1 or kv.dtype != q.dtype:
        raise ValueError(
            f"queries {tuple(q.shape)} in {q.dtype} with strides {q.stride()} do not attend to latents of "
            f"{width} in {kv.dtype}: both must be alike, and contiguous within a token and a slot"
        )
    if out.shape != (*q.shape[:2], cache.latent) or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous, {(*q.shape[:2], cache.latent)}, and is {tuple(out.shape)} with strides "
            f"{out.stride()}"
        )


@triton.jit
def load_queries(
    q: tl.tensor, offset: tl.tensor, inside: tl.tensor, LATENT: tl.constexpr, WIDTH: tl.constexpr,
    DIM: tl.constexpr, REST_DIM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load queries [M, DIM] and what is behind them [M, REST_DIM], from `offset` [M] on; 0 if not inside."""
    dim, rest = tl.arange(0, DIM), tl.arange(0, REST_DIM)
    pointer = q + offset[:, None]
    first = tl.load(pointer + dim[None, :], mask=inside[:, None] & (dim < LATENT)[None, :], other=0.0)
    is_rest = inside[:, None] & (rest < WIDTH - LATENT)[None, :]
    return first, tl.load(pointer + LATENT + rest[None, :], mask=is_rest, other=0.0)


@triton.jit
def attend_to_tile(
    q: tl.tensor, q_rest: tl.tensor, kv: tl.tensor, blocks: tl.tensor, first_key: tl.tensor,
    num_keys: tl.tensor, block_stride: tl.tensor, slot_stride: tl.tensor, seen: tl.tensor, acc: tl.tensor,
    peak: tl.tensor, total: tl.tensor, scale_log2: tl.tensor, softcap_log2: tl.tensor, slope: tl.tensor,
    position: tl.tensor, BLOCK_SIZE: tl.constexpr, LATENT: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Take in the latents from `first_key` on, `blocks` being theirs; see `attention.kv_tile.attend`."""
    dim, rest = tl.arange(0, q.shape[1]), tl.arange(0, q_rest.shape[1])
    key = first_key + tl.arange(0, TILE)
    pointer = kv + (blocks.to(tl.int64) * block_stride + key % BLOCK_SIZE * slot_stride)[:, None]
    inside = (key < num_keys)[:, None]
    if MASKED or q.shape[1] > LATENT:
        latent = tl.load(pointer + dim[None, :], mask=inside & (dim < LATENT)[None, :], other=0.0)
    else:
        latent = tl.load(pointer + dim[None, :])
    if MASKED or q_rest.shape[1] > WIDTH - LATENT:
        is_rest = inside & (rest < WIDTH - LATENT)[None, :]
        behind = tl.load(pointer + LATENT + rest[None, :], mask=is_rest, other=0.0)
    else:
        behind = tl.load(pointer + LATENT + rest[None, :])
    scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
    scores = tl.dot(q_rest, tl.trans(behind), scores, input_precision="ieee")
    return attend_by_scores(
        scores, latent, seen, acc, peak, total, scale_log2, MASKED, softcap_log2, slope, position, first_key
    )
