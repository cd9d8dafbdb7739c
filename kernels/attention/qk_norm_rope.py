"""Heads of a row's newest token as the projection gives them, normalised and rotated on the way in.

What is known before the projection has ended is loaded apart from it, so that nothing waits twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.pointwise.norm import times_weight


@triton.jit
def other_half(dim: tl.tensor, HEAD_DIM: tl.constexpr) -> tl.tensor:
    """With which dimension of its head each of `dim` is rotated."""
    return tl.where(dim < HEAD_DIM // 2, dim + HEAD_DIM // 2, dim - HEAD_DIM // 2)


@triton.jit
def load_weights(norm: tl.tensor, dim: tl.tensor, HEAD_DIM: tl.constexpr) -> tl.tensor:
    """Load a norm's weights [1, DIM] in fp32 for `dim` and what it is rotated with; anything without one."""
    if norm is None:
        none = tl.zeros_like(dim).to(tl.float32)[None, :]
        return none, none
    else:
        own = tl.load(norm + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
        other = tl.load(norm + other_half(dim, HEAD_DIM), mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
        return own[None, :], other[None, :]


@triton.jit
def load_angles(rope: tl.tensor, position: tl.tensor, dim: tl.tensor, HEAD_DIM: tl.constexpr) -> tl.tensor:
    """Cosine and signed sine [1, DIM] in fp32 by which `dim` is rotated; anything if `rope` is None."""
    if rope is None:
        none = tl.zeros_like(dim).to(tl.float32)[None, :]
        return none, none
    else:
        angle = rope + position.to(tl.int64) * HEAD_DIM + tl.minimum(dim, other_half(dim, HEAD_DIM))
        cos = tl.load(angle, mask=dim < HEAD_DIM, other=0.0)
        sin = tl.load(angle + HEAD_DIM // 2, mask=dim < HEAD_DIM, other=0.0)
        return cos[None, :], tl.where(dim < HEAD_DIM // 2, -sin, sin)[None, :]


@triton.jit
def normed_and_rotated(
    x: tl.tensor,
    other: tl.tensor,
    weight: tl.tensor,
    other_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: tl.tensor,
    norm: tl.tensor,
    ROTATED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """Heads x [M, DIM], `other` in the order of `other_half`; rounded where `attention.write_kv` rounds.

    norm: where the weights are from; None: there are none.
    """
    dtype = x.dtype
    if norm is not None:
        WIDE: tl.constexpr = norm.dtype.element_ty == tl.float32
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + eps)[:, None]
        x = times_weight(wide * scale, weight, dtype, WIDE)
        other = times_weight(other.to(tl.float32) * scale, other_weight, dtype, WIDE)
    if ROTATED:
        x = (x.to(tl.float32) * cos + other.to(tl.float32) * sin).to(dtype)
    return x
