"""A tile of consecutive keys of one sequence in the paged cache: what the attention kernels share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.softmax import capped, sloped
from quire.kernels.formats.fp8 import dequantize_tile
from quire.kernels.formats.fp12 import load_planes_tile
from quire.kernels.formats.kv_scales import load_words
from quire.kernels.formats.layer_cache import LayerCache

# Start of a running maximum: finite, so that "nothing seen yet" minus itself is 0 and not NaN.
LOWEST = tl.constexpr(-1.0e30)
LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 512
LARGEST_KEY_TILE = 64  # that attention with a window reads: from the tile on in which the window begins
# A tile has keys of several blocks, or is a part of one.
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def tile_keys(dim: int, itemsize: int) -> int:
    """Return how many keys are best in a tile, if there is room (see `attention.key_tiles`)."""
    return 64 if dim * itemsize <= 512 else 32


@triton.jit
def load_blocks(
    table: tl.tensor, first_key: tl.tensor, num_keys: tl.tensor, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Block ids of the keys from `first_key`, a multiple of TILE: [TILE], or one where a block has them all.

    An id is 0 from key `num_keys` on. Loops load ids one tile ahead of K and V: in the same round they would
    cost the pipeline its depth.
    """
    if BLOCK_SIZE >= TILE:
        return tl.load(table + first_key // BLOCK_SIZE, mask=first_key < num_keys, other=0)
    else:
        key = first_key + tl.arange(0, TILE)
        return tl.load(table + key // BLOCK_SIZE, mask=key < num_keys, other=0)


@triton.jit
def load_tile(
    kv: tl.tensor,
    blocks: tl.tensor,
    first_key: tl.tensor,
    num_keys: tl.tensor,
    block_stride: tl.tensor,
    part_stride: tl.tensor,
    slot_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    kv_scales: tl.tensor = None,
    scale_stride: tl.tensor = 0,
    dtype: tl.constexpr = None,
    PLANES: tl.constexpr = False,
) -> tl.tensor:
    """Load K and V [TILE, DIM] from `first_key` on; 0 past key `num_keys` (if MASKED) and past HEAD_DIM.

    `kv` points at the kv head in block 0, `blocks` are `load_blocks` of the same keys. Those of a cache with
    scales are dequantised to `dtype`; `kv_scales` points at the kv head's words in block 0. PLANES: vectors
    are planes (`formats.fp12`).
    """
    key = first_key + tl.arange(0, TILE)
    dim = tl.arange(0, DIM)
    slot = blocks.to(tl.int64) * block_stride + key % BLOCK_SIZE * slot_stride
    if kv_scales is not None:
        words = load_words(kv_scales, blocks, first_key, num_keys, scale_stride, BLOCK_SIZE, TILE, MASKED)
    if PLANES:
        k, v = load_planes_tile(kv, part_stride, slot, key < num_keys, words, dtype, DIM, BLOCK_SIZE, MASKED)
    else:
        pointer = kv + slot[:, None] + dim[None, :]
        if MASKED or HEAD_DIM < DIM:
            mask = (dim < HEAD_DIM)[None, :]
            if MASKED:
                mask = mask & (key < num_keys)[:, None]
            k = tl.load(pointer, mask=mask, other=0.0)
            v = tl.load(pointer + part_stride, mask=mask, other=0.0)
        else:
            k = tl.load(pointer)
            v = tl.load(pointer + part_stride)
        if kv_scales is not None:
            k, v = dequantize_tile(k, v, words, dtype)
    return k, v


@triton.jit
def ask_for_tile(
    kv: tl.tensor,
    blocks: tl.tensor,
    first_key: tl.tensor,
    block_stride: tl.tensor,
    part_stride: tl.tensor,
    slot_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    PLANES: tl.constexpr,
) -> None:
    """Have a tile's K and V brought to the L2 cache, where `load_tile` finds them sooner. For a GPU only.

    Of an fp12 cache all planes, but not the scales.
    """
    PIECES: tl.constexpr = 3 if PLANES else 1
    BYTES: tl.constexpr = kv.dtype.element_ty.primitive_bitwidth // 8
    LINE: tl.constexpr = 128 // BYTES
    WIDTH: tl.constexpr = DIM // 2 if PLANES else DIM
    LINES: tl.constexpr = WIDTH // LINE if WIDTH > LINE else 1
    key = first_key + tl.arange(0, TILE)
    slot = blocks.to(tl.int64) * block_stride + key % BLOCK_SIZE * slot_stride
    dim = tl.minimum(tl.arange(0, LINES) * LINE, HEAD_DIM - 1)
    k = (kv + slot[:, None] + dim[None, :]).to(tl.int64)
    for part in tl.static_range(2):
        for plane in tl.static_range(PIECES):
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [k + part * part_stride * BYTES + plane * (BLOCK_SIZE * WIDTH)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def attend(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    seen: tl.tensor,
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    scale_log2: tl.tensor,
    MASKED: tl.constexpr,
    softcap_log2: tl.tensor = None,
    slope: tl.tensor = None,
    position: tl.tensor = 0,
    first_key: tl.tensor = 0,
) -> tl.tensor:
    """One step of online softmax (Milakov & Gimelshein 2018) in base 2; returns the new (acc, peak, total).

    q [M, DIM], k and v [TILE, DIM], seen [M or 1, TILE] (used if MASKED), acc [M, DIM], peak and total [M].
    `scale_log2` is the softmax scale times log2(e), and `softcap_log2` that of scores or None; slope [M] or
    None, position and first_key as `attention.softmax.sloped` has them.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    return attend_by_scores(
        scores, v, seen, acc, peak, total, scale_log2, MASKED, softcap_log2, slope, position, first_key
    )


@triton.jit
def attend_by_scores(
    scores: tl.tensor,
    v: tl.tensor,
    seen: tl.tensor,
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    scale_log2: tl.tensor,
    MASKED: tl.constexpr,
    softcap_log2: tl.tensor = None,
    slope: tl.tensor = None,
    position: tl.tensor = 0,
    first_key: tl.tensor = 0,
) -> tl.tensor:
    """Do the same as `attend` from scores [M, TILE] on, which are not scaled yet."""
    if slope is not None:
        scores = sloped(scores * scale_log2, slope, position, first_key, v.shape[0])
        scale_log2 = 1.0
    if softcap_log2 is not None:
        scores = capped(scores * scale_log2, softcap_log2)
        scale_log2 = 1.0
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_peak, total


def check_attention_inputs(q: torch.Tensor, out: torch.Tensor, cache: LayerCache) -> None:
    """Raise ValueError unless q, out [T, Hq, D] and the cache suit the kernels."""
    cache.check()
    heads, dim = q.shape[1:]
    kv, kv_heads, block_size, kv_dim = cache.kv, cache.kv_heads, cache.block_size, cache.head_dim
    if dim != kv_dim or dim > MAX_HEAD_DIM or heads % kv_heads or heads > 64 * kv_heads:
        raise ValueError(
            f"q has {heads} heads of dim {dim} and the cache {kv_heads} heads of dim {kv_dim}; the dims must "
            f"agree and be at most {MAX_HEAD_DIM}, and each kv head must serve the same 1 to 64 query heads"
        )
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block size {block_size} is not supported; use one of {BLOCK_SIZES}")
    if out.shape != q.shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous and of q's shape {tuple(q.shape)}, is {tuple(out.shape)}")
    if q.stride()[1:] != (dim, 1) or kv.stride(-1) != 1:
        raise ValueError(
            f"q's heads must be contiguous within a token and head dims within a slot; "
            f"strides are {q.stride()} and {kv.stride()}"
        )
