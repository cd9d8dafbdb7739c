"""Keys and values in eight bits: e4m3, scaled so that the largest of each token and head is 448.

A scale (`formats.kv_scales`) depends on nothing but the token's own vector: not on the batch, not on what
came before. A vector with a number past 448 times the largest scale is read as NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention.softmax import capped, sloped
from quire.kernels.formats.kv_scales import unless_broken, unpack

DTYPE = torch.float8_e4m3fn
VALUES = torch.arange(256, dtype=torch.uint8).view(DTYPE).float()  # on a CPU quicker than to convert
LARGEST = tl.constexpr(448.0)  # of e4m3
SMALLEST_NORMAL = tl.constexpr(2.0**-6)  # of e4m3
SMALLEST_SCALE = tl.constexpr(2.0**-14)  # below it fp16 is less exact
LARGEST_SCALE = tl.constexpr(65504.0)
BEYOND = 29345794.0  # the next fp32 above 448 times the largest scale
BEYOND_BITS = tl.constexpr(0x4BDFE401)  # of BEYOND in fp32


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [..., D] -> (values [..., D] in e4m3, scales [...] in fp16) with x ≈ values · scales."""
    x = x.float()
    scales = x.abs().amax(-1) * (1 / LARGEST.value)
    scales = unless_broken(scales.clamp(SMALLEST_SCALE.value, LARGEST_SCALE.value).half(), x, BEYOND)
    x = x * (1 / scales.float()).unsqueeze(-1)
    return x.clamp(-LARGEST.value, LARGEST.value).to(DTYPE), scales


def dequantize(encoded: Tensor, scales: Tensor) -> Tensor:
    """Return [..., D] fp32 of e4m3's bytes [..., D] and their scales [...]."""
    values = VALUES.to(encoded.device).index_select(0, encoded.flatten().int()).view(encoded.shape)
    return values.mul_(scales.unsqueeze(-1))


@triton.jit
def scale_of(peak: tl.tensor) -> tl.tensor:
    """Return the scale (fp16) of vectors with these largest magnitudes (fp32), and its inverse (fp32)."""
    scale = tl.minimum(tl.maximum(peak * (1 / LARGEST), SMALLEST_SCALE), LARGEST_SCALE).to(tl.float16)
    return scale, tl.div_rn(1.0, scale.to(tl.float32))


@triton.jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """Return the nearest e4m3 of fp32, ties to even; Triton's interpreter, left alone, does not round."""
    x = tl.clamp(x, -LARGEST, LARGEST)
    power = tl.maximum(tl.abs(x), SMALLEST_NORMAL).to(tl.int32, bitcast=True) & 0x7F800000
    # Beside this fp32 has e4m3's places: 2^(e - 3) for values from 2^e on.
    coarse = power.to(tl.float32, bitcast=True) * (1.5 * 2**20)
    return ((x + coarse) - coarse).to(tl.float8e4nv)


@triton.jit
def as_exact(q: tl.tensor, kv: tl.tensor) -> tl.tensor:
    """Return q in a type that kv's quickly converts to: for e4m3 bf16 as fp16, exact up to 65504."""
    if kv.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        return q.to(tl.float16)
    else:
        return q


@triton.jit
def dequantize_tile(k: tl.tensor, v: tl.tensor, words: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return K and V [TILE, DIM] in `dtype`."""
    k_scale, v_scale = unpack(words)
    return k.to(dtype) * k_scale.to(dtype)[:, None], v.to(dtype) * v_scale.to(dtype)[:, None]


@triton.jit
def load_paired_tile(
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
) -> tl.tensor:
    """Load K [TILE, DIM] in e4m3 and V [TILE, DIM // 2] in pairs of dims; see `attention.kv_tile`.

    Pairs, because a matrix product wants V by columns, and shared memory turns 16 bits at a time.
    """
    key = first_key + tl.arange(0, TILE)
    dim = tl.arange(0, DIM)
    pair = tl.arange(0, DIM // 2)
    slot = blocks.to(tl.int64) * block_stride + key % BLOCK_SIZE * slot_stride
    pairs = (kv + part_stride + slot).to(tl.pointer_type(tl.int16))
    inside = (key < num_keys)[:, None]
    k = tl.load(kv + slot[:, None] + dim[None, :], mask=inside & (dim < HEAD_DIM)[None, :], other=0.0)
    v = tl.load(pairs[:, None] + pair[None, :], mask=inside & (pair < HEAD_DIM // 2)[None, :], other=0)
    return k, v


@triton.jit
def split_dims(acc: tl.tensor) -> tl.tensor:
    """Split acc [M, DIM] in its even and its odd dims [M, DIM // 2]; `tl.interleave` joins them."""
    return tl.split(tl.reshape(acc, [acc.shape[0], acc.shape[1] // 2, 2]))


@triton.jit
def attend_paired(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    words: tl.tensor,
    seen: tl.tensor,
    even: tl.tensor,
    odd: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    scale_log2: tl.tensor,
    softcap_log2: tl.tensor = None,
    slope: tl.tensor = None,
    position: tl.tensor = 0,
    first_key: tl.tensor = 0,
) -> tl.tensor:
    """Attend as `attention.kv_tile.attend` does, to what `load_paired_tile` gave.

    even and odd are acc's dims [M, DIM // 2].

    q is as `as_exact` gives it. For few queries: scales multiply scores and weights, which are fewer than K
    and V. A weight times its value's scale must fit fp16, so `peak` is of these products (but for mantissas).
    """
    k_scale, v_scale = unpack(words)
    v_scale = v_scale.to(tl.float32)
    v_exponent = (v_scale.to(tl.int32, bitcast=True) >> 23) - 127
    v_power = ((127 - v_exponent) << 23).to(tl.float32, bitcast=True)  # one over 2^exponent
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    scores = scores * (k_scale.to(tl.float32) * scale_log2)[None, :]
    if slope is not None:
        scores = sloped(scores, slope, position, first_key, k.shape[0])
    if softcap_log2 is not None:
        scores = capped(scores, softcap_log2)
    scores = scores + v_exponent.to(tl.float32)[None, :]
    scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights * v_power[None, :], 1)
    weights = (weights * (v_scale * v_power)[None, :]).to(q.dtype)
    v_even = v.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(q.dtype)
    v_odd = (v >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(q.dtype)
    even = tl.dot(weights, v_even, even * decay[:, None], input_precision="ieee")
    odd = tl.dot(weights, v_odd, odd * decay[:, None], input_precision="ieee")
    return even, odd, new_peak, total
