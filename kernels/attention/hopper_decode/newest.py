"""The newest token's key and value, and what goes to an fp12 cache, in `attention.hopper_decode.decode`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.formats.fp12 import BEYOND_BITS, as_held, nearest_bf16, scale_of, to_words
from quire.kernels.formats.kv_scales import is_broken, packed
from quire.kernels.pointwise.norm import times_weight


@gluon.jit
def normed_key(
    key: gl.tensor, other: gl.tensor, weight: gl.tensor, other_weight: gl.tensor, eps: gl.tensor,
    HEAD_DIM: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """Return RMSNorm of a key [DIM] and of `other`, the same with halves exchanged; zeros from HEAD_DIM on.

    Rounded as `write_kv` rounds.
    """
    dtype: gl.constexpr = key.dtype
    wide = key.to(gl.float32)
    norm = gl.rsqrt(gl.sum(wide * wide, 0) / HEAD_DIM + eps)
    WIDE: gl.constexpr = weight.dtype == gl.float32
    key = times_weight(wide * norm, weight.to(gl.float32), dtype, WIDE)
    other = times_weight(other.to(gl.float32) * norm, other_weight.to(gl.float32), dtype, WIDE)
    return key, other


@gluon.jit
def rotated(heads: gl.tensor, others: gl.tensor, cos: gl.tensor, sin: gl.tensor) -> gl.tensor:
    """Rotate heads [..., DIM], whose numbers of the other half are `others`."""
    return (heads.to(gl.float32) * cos + others.to(gl.float32) * sin).to(heads.dtype)


@gluon.jit
def _quantized(x: gl.tensor) -> gl.tuple:
    """Round as `formats.fp12.quantized` one vector [DIM]."""
    broken = gl.max(is_broken(x, BEYOND_BITS), 0) > 0
    x = nearest_bf16(x)
    scale, inverse = scale_of(gl.max(gl.abs(x), 0))
    return as_held(x * inverse), gl.where(broken, float("nan"), scale)


@gluon.jit
def _store_vector(planes: gl.tensor, x: gl.tensor, dim: gl.tensor, BLOCK_SIZE: gl.constexpr) -> None:
    """Write e4m7's values x [DIM], of which `dim` is the index: see `formats.fp12`."""
    QUARTER: gl.constexpr = x.shape[0] // 4
    LAYOUT: gl.constexpr = dim.type.layout
    words = to_words(x)
    quarter = dim // QUARTER
    low = (words & 0xFF) << 8 * (quarter % 2)
    rest = (words & 0x8700) >> 4 * quarter
    rest = gl.where(quarter == 3, ((words & 0x8000) >> 12) | ((words & 0x0700) << 4), rest)
    column = gl.arange(0, QUARTER, LAYOUT)
    plane = (gl.where(quarter < 2, low, 0), gl.where(quarter < 2, 0, low), rest)
    for number in gl.static_range(3):
        whole = gl.sum(plane[number].reshape([4, QUARTER]), 0)  # of four numbers' bits, none of them twice
        whole = gl.convert_layout(whole, LAYOUT).to(gl.int16)
        gl.store(planes + (number * BLOCK_SIZE * QUARTER + column), whole)


@gluon.jit
def store_planes(
    planes: gl.tensor, part_stride: gl.tensor, scales: gl.tensor, key: gl.tensor, value: gl.tensor,
    dim: gl.tensor, BLOCK_SIZE: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """Write a key and a value [DIM] in fp32 and their scales -> what the cache holds of them, in fp32.

    planes: where the key's first word goes, `part_stride` words before the value's; scales: where their word
    goes.
    """
    held_key, key_scale = _quantized(key)
    held_value, value_scale = _quantized(value)
    _store_vector(planes, held_key, dim, BLOCK_SIZE)
    _store_vector(planes + part_stride, held_value, dim, BLOCK_SIZE)
    gl.store(scales, packed(key_scale, value_scale))
    return held_key * key_scale.to(gl.float32), held_value * value_scale.to(gl.float32)
