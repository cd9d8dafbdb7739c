"""The scales of a cache that holds rounded keys and values (`formats.fp8`, `formats.fp12`): one a vector.

fp16 [blocks, kv heads, block size, 2], a key's beside its value's, so that one 32-bit word brings both. That
of a vector with a NaN, an infinity or a number past the format's range is NaN: what comes of it is not to
pass for something that was computed, nor a clipped number for the model's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SCALE_TYPE = torch.float16
BOTH_ONE = tl.constexpr(0x3C003C00)  # two scales of 1 as a word


def words(kv_scales: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Scales as the attention kernels take them: a word for each key, and words from block to block and head
    to head.
    """
    if kv_scales is None:
        return None, 0, 0
    both = kv_scales.view(torch.int32)
    return both, both.stride(0), both.stride(1)


def unless_broken(scales: Tensor, x: Tensor, beyond: float) -> Tensor:
    """Return scales [...] of x [..., D], but NaN where a number's magnitude is NaN or not below `beyond`."""
    return scales.where((x.abs() < beyond).all(-1), torch.nan)


@triton.jit
def load_words(
    scales: tl.tensor,
    blocks: tl.tensor,
    first_key: tl.tensor,
    num_keys: tl.tensor,
    block_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Scales of the keys from `first_key` as words [TILE]; see `attention.kv_tile.load_tile`."""
    key = first_key + tl.arange(0, TILE)
    pointer = scales + blocks.to(tl.int64) * block_stride + key % BLOCK_SIZE
    if MASKED:
        return tl.load(pointer, mask=key < num_keys, other=BOTH_ONE)
    else:
        return tl.load(pointer)


@triton.jit
def unpack(words: tl.tensor) -> tl.tensor:
    """Return the scales (fp16) of keys and of values."""
    key_scale = words.to(tl.int16).to(tl.float16, bitcast=True)
    return key_scale, (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def packed(key_scale: tl.tensor, value_scale: tl.tensor) -> tl.tensor:
    """Pack a key's and its value's scale (fp16) in a word."""
    low = key_scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | value_scale.to(tl.int16, bitcast=True).to(tl.int32) << 16


@triton.jit
def is_broken(x: tl.tensor, BEYOND: tl.constexpr) -> tl.tensor:
    """Return 1 for fp32 values that are NaN or whose magnitude's bits are BEYOND or more, 0 for others.

    The scale of a vector with one of them is NaN.
    """
    return ((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= BEYOND).to(tl.int32)
