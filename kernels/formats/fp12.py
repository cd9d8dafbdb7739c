"""Keys and values in twelve bits: sign, four of exponent, bf16's seven of mantissa, scaled by powers of two.

A vector's scale (`formats.kv_scales`) brings its largest number to between 1 and 2, if it is from 2^-14 to
2^16, and depends on nothing else. All of bf16's numbers down to 2^-14 of the scale are held to the bit,
smaller ones in steps of 2^-21, as e4m7 underflows gradually. Past 65,280 there is none: a vector with such a
number is read as NaN.

A vector of D numbers is three planes of D/4 words of 16 bits. Word c of plane `a` has the low eight bits of
dimensions c and D/4 + c, of plane `b` those of D/2 + c and 3 D/4 + c, and of plane `rest` what is left of all
four: sign and three bits of exponent, those of dimension j D/4 + c where they are in a bf16, turned right by
4 j. So a quarter of a vector comes from words by one mask for its low bits and one (the last quarter: two)
for the others, two words at once, as bf16 with exponents too small by 112.

In a cache each plane of a head's block is in one piece, [3, block size, D/2 bytes]: were each vector in one,
decode attention would read 2.85 TB/s on an H100 instead of 3.0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.kv_scales import is_broken, unless_broken, unpack

DTYPE = torch.uint8  # of planes
SMALLEST_SCALE = tl.constexpr(2.0**-14)  # below it fp16 is less exact
LARGEST_SCALE = tl.constexpr(2.0**15)
BEYOND = 65408.0  # and what is larger becomes no number of bf16 that a scale brings below 2
BEYOND_BITS = tl.constexpr(0x477F8000)  # of BEYOND in fp32
SMALLEST_NORMAL = tl.constexpr(2.0**-14)  # of e4m7
SIGN_AND_EXPONENT = -0x7900  # what a plane `rest` has of a number, as int16: 0x8700
COARSE = tl.constexpr(6.0)  # beside it fp32 has steps of 2^-21
# Two words $1 of a plane `a` or `b` and of `rest` $2 -> a quarter's bf16s, but 2^112 times too small.
MADE_SMALL = tl.constexpr(2.0**112)
PAIRS = tl.constexpr((
    "{.reg .b32 t; and.b32 t, $2, 0x87008700; lop3.b32 $0, $1, 0x00ff00ff, t, 0xEA;}",
    "{.reg .b32 t, u; shl.b32 t, $2, 4; and.b32 t, t, 0x87008700;"
    " shr.u32 u, $1, 8; lop3.b32 $0, u, 0x00ff00ff, t, 0xEA;}",
    "{.reg .b32 t; shl.b32 t, $2, 8; and.b32 t, t, 0x87008700; lop3.b32 $0, $1, 0x00ff00ff, t, 0xEA;}",
    "{.reg .b32 s, t, u; shl.b32 s, $2, 12; and.b32 s, s, 0x80008000;"
    " shr.u32 t, $2, 4; lop3.b32 t, t, 0x07000700, s, 0xEA;"
    " shr.u32 u, $1, 8; lop3.b32 $0, u, 0x00ff00ff, t, 0xEA;}",
))  # fmt: skip
# The same times $3. A product alone would take Hopper; what is added, -0, changes none.
SCALED_PAIRS = tl.constexpr(
    tuple(
        "{.reg .b32 pair, none; mov.b32 none, 0x80008000; "
        f"{pair.replace('$0', 'pair')} fma.rn.bf16x2 $0, pair, $3, none;}}"
        for pair in PAIRS.value
    )
)


def vector_bytes(head_dim: int) -> int:
    """Raises ValueError for head dims that planes do not suit."""
    if head_dim % 32 or head_dim & (head_dim - 1):
        raise ValueError(f"fp12_e4m7 needs head dims of 32, 64, 128 or 256, the model has {head_dim}")
    return head_dim * 3 // 2


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [..., D] -> (planes [..., 3, D/2] u8, scales [...] fp16); see the module."""
    given, x = x, x.bfloat16().float()
    peak = x.abs().amax(-1).clamp(SMALLEST_SCALE.value, LARGEST_SCALE.value)
    scales = torch.ldexp(torch.ones_like(peak), peak.frexp().exponent - 1)
    x = x / scales.unsqueeze(-1)
    x = torch.where(x.abs() < SMALLEST_NORMAL.value, (x + COARSE.value) - COARSE.value, x)
    bits = x.half().view(torch.int16).int()
    words = (bits & 0x8000) | (bits & 0x3FFF) >> 3  # as in a bf16
    quarters = words.unflatten(-1, (4, -1))
    low, high = quarters & 0xFF, quarters & 0x8700
    turned = [(part >> 4 * j | part << (16 - 4 * j)) & 0xFFFF for j, part in enumerate(high.unbind(-2))]
    planes = (low[..., 0, :] | low[..., 1, :] << 8, low[..., 2, :] | low[..., 3, :] << 8, sum(turned))
    scales = unless_broken(scales.half(), given, BEYOND)
    return torch.stack(planes, -2).to(torch.int16).view(torch.uint8), scales


def dequantize(planes: Tensor, scales: Tensor) -> Tensor:
    """Return [..., D] fp32 of what `quantize` gave."""
    a, b, rest = planes.view(torch.int16).unbind(-2)
    low = (a & 0xFF, (a >> 8) & 0xFF, b & 0xFF, (b >> 8) & 0xFF)
    last = ((rest << 12) & -0x8000) | ((rest >> 4) & 0x700)
    high = (rest & SIGN_AND_EXPONENT, (rest << 4) & SIGN_AND_EXPONENT, (rest << 8) & SIGN_AND_EXPONENT, last)
    words = torch.cat([bits | others for bits, others in zip(low, high, strict=True)], -1)
    return words.view(torch.bfloat16).float().mul_((scales.float() * 2.0**112).unsqueeze(-1))


@triton.jit
def nearest_bf16(x: tl.tensor) -> tl.tensor:
    """Round fp32 values to bf16's, ties to even; Triton's interpreter, left alone, does not round."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(peak: tl.tensor) -> tl.tensor:
    """Return the scale (fp16) of vectors with these largest magnitudes (fp32), and its inverse (fp32)."""
    power = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.minimum(tl.maximum(power, SMALLEST_SCALE), LARGEST_SCALE)
    return scale.to(tl.float16), 1.0 / scale  # of a power of two exact


@triton.jit
def as_held(x: tl.tensor) -> tl.tensor:
    """Scaled fp32 values that are a bf16's -> e4m7's next to them."""
    return tl.where(tl.abs(x) < SMALLEST_NORMAL, (x + COARSE) - COARSE, x)


@triton.jit
def quantized(x: tl.tensor) -> tl.tensor:
    """Vectors x [N, D] in fp32 -> e4m7's values [N, D] in fp32 and scales [N, 1] in fp16."""
    broken = tl.max(is_broken(x, BEYOND_BITS), axis=1, keep_dims=True) > 0
    x = nearest_bf16(x)
    scale, inverse = scale_of(tl.max(tl.abs(x), axis=1, keep_dims=True))
    return as_held(x * inverse), tl.where(broken, float("nan"), scale)


@triton.jit
def to_words(x: tl.tensor) -> tl.tensor:
    """Return e4m7's values in fp32 as their twelve bits where they are in a bf16, as int32."""
    bits = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return (bits & 0x8000) | ((bits & 0x3FFF) >> 3)


@triton.jit
def store_planes(
    planes: tl.tensor, first: tl.tensor, second: tl.tensor, mask: tl.tensor, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Write vectors of which `first` and `second` [N, HALF] are the halves' words (see `to_words`).

    planes [N, 1]: where the first of each goes, as pointers to 16 bits; mask [N, 1].
    """
    QUARTER: tl.constexpr = HALF // 2
    COUNT: tl.constexpr = first.shape[0]
    column = tl.arange(0, QUARTER)[None, :]
    w0, w1 = tl.split(tl.permute(tl.reshape(first, [COUNT, 2, QUARTER]), [0, 2, 1]))
    w2, w3 = tl.split(tl.permute(tl.reshape(second, [COUNT, 2, QUARTER]), [0, 2, 1]))
    turned = w0 & 0x8700
    turned |= (w1 & 0x8700) >> 4
    turned |= (w2 & 0x8700) >> 8
    turned |= ((w3 & 0x8000) >> 12) | ((w3 & 0x0700) << 4)
    tl.store(planes + column, ((w0 & 0xFF) | ((w1 & 0xFF) << 8)).to(tl.int16), mask)
    planes += BLOCK_SIZE * QUARTER
    tl.store(planes + column, ((w2 & 0xFF) | ((w3 & 0xFF) << 8)).to(tl.int16), mask)
    planes += BLOCK_SIZE * QUARTER
    tl.store(planes + column, turned.to(tl.int16), mask)


@triton.jit
def store_vector(planes: tl.tensor, x: tl.tensor, BLOCK_SIZE: tl.constexpr) -> None:
    """Write e4m7's values x [1, D] in fp32 to planes, as a pointer to bytes."""
    HALF: tl.constexpr = x.shape[1] // 2
    first, second = tl.split(tl.permute(tl.reshape(to_words(x), [1, 2, HALF]), [0, 2, 1]))
    there = tl.full([1, 1], 1, tl.int1)
    planes = planes.to(tl.pointer_type(tl.int16)) + tl.zeros([1, 1], tl.int32)
    store_planes(planes, first, second, there, HALF, BLOCK_SIZE)


@triton.jit
def load_quarters(
    planes: tl.tensor, scale: tl.tensor, mask: tl.tensor, dtype: tl.constexpr, QUARTER: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the quarters [N, QUARTER] of vectors in `dtype`, times their scales.

    planes [N, 1]: where the first of each is, as pointers to 16 bits; scale [N, 1] fp16; mask [N, 1], used if
    MASKED: others are 0.
    """
    PLANE: tl.constexpr = BLOCK_SIZE * QUARTER
    planes += tl.arange(0, QUARTER)[None, :]
    if MASKED:
        a = tl.load(planes, mask, 0)
        b = tl.load(planes + PLANE, mask, 0)
        rest = tl.load(planes + 2 * PLANE, mask, 0)
    else:
        a = tl.load(planes)
        b = tl.load(planes + PLANE)
        rest = tl.load(planes + 2 * PLANE)
    if dtype == tl.bfloat16:  # two numbers at once, which are exact times any scale: both are short
        factor, _ = tl.broadcast((scale.to(tl.float32) * MADE_SMALL).to(dtype), a)
        q0, q1 = _scaled_pairs(a, rest, factor, 0), _scaled_pairs(a, rest, factor, 1)
        return q0, q1, _scaled_pairs(b, rest, factor, 2), _scaled_pairs(b, rest, factor, 3)
    else:
        factor = scale.to(dtype)
        a, b = a.to(tl.uint16, bitcast=True), b.to(tl.uint16, bitcast=True)
        rest = rest.to(tl.uint16, bitcast=True)
        q0 = _number((a & 0xFF) | (rest & 0x8700), dtype)
        q1 = _number((a >> 8) | ((rest << 4) & 0x8700), dtype)
        q2 = _number((b & 0xFF) | ((rest << 8) & 0x8700), dtype)
        q3 = _number((b >> 8) | ((rest << 12) & 0x8000) | ((rest >> 4) & 0x0700), dtype)
        return q0 * factor, q1 * factor, q2 * factor, q3 * factor


@triton.jit
def _scaled_pairs(low: tl.tensor, rest: tl.tensor, factor: tl.tensor, QUARTER: tl.constexpr) -> tl.tensor:
    return tl.inline_asm_elementwise(
        SCALED_PAIRS[QUARTER], "=r,r,r,r", [low, rest, factor], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _number(words: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    bits = (words & 0x8000) | ((words & 0x07FF) << 3)
    return bits.to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def joined(quarters: tl.tensor) -> tl.tensor:
    """Quarters [N, D/4] as one tensor [N, D]."""
    q0, q1, q2, q3 = quarters
    both = tl.join(tl.join(q0, q2), tl.join(q1, q3))  # [N, D/4, 2, 2]: quarter = 2 · third + last, turned
    return tl.reshape(tl.permute(both, [0, 2, 3, 1]), [q0.shape[0], 4 * q0.shape[1]])


@triton.jit
def load_planes_tile(
    kv: tl.tensor, part_stride: tl.tensor, slot: tl.tensor, inside: tl.tensor, words: tl.tensor,
    dtype: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load K and V [TILE, DIM] in `dtype` of slots [TILE], in bytes; see `attention.kv_tile.load_tile`."""
    QUARTER: tl.constexpr = DIM // 4
    k_planes = (kv + slot).to(tl.pointer_type(tl.int16))[:, None]
    v_planes = (kv + part_stride + slot).to(tl.pointer_type(tl.int16))[:, None]
    k_scale, v_scale = unpack(words)
    inside = inside[:, None]
    k = joined(load_quarters(k_planes, k_scale[:, None], inside, dtype, QUARTER, BLOCK_SIZE, MASKED))
    v = joined(load_quarters(v_planes, v_scale[:, None], inside, dtype, QUARTER, BLOCK_SIZE, MASKED))
    return k, v
