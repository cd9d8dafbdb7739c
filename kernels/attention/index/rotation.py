"""Rotation of an indexer's queries and keys by position, in one kernel, rounded as torch rounds it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 4096  # that a program rotates, or those of one head


def rotate_index(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, last: bool) -> Tensor:
    """Rotate so many of x [T, H, D] as cos and sin [T, R] have numbers -> [T, H, D].

    interleaved: neighbours rotate together, and stand in two halves then; else halves do. last: of D the last
    numbers do, else the first.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    tokens, heads, width = x.shape
    dim = triton.next_power_of_2(width)
    group = min(triton.next_power_of_2(heads), max(NUMBERS // dim, 1))
    _rotate_kernel[tokens, triton.cdiv(heads, group)](
        out, x, cos, sin, HEADS=heads, GROUP=group, WIDTH=width, DIM=dim, ROTATED=cos.shape[1],
        BEGIN=width - cos.shape[1] if last else 0, INTERLEAVED=interleaved,
        WIDE=cos.dtype == torch.float32, num_warps=4, enable_fp_fusion=cos.dtype == torch.float32,
    )  # fmt: skip
    return out


def rotate_index_reference(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, last: bool) -> Tensor:
    """Do the same as `rotate_index` in plain torch, as transformers' models do."""
    rotated, half = cos.shape[-1], cos.shape[-1] // 2
    cos, sin = cos[:, None], sin[:, None]
    if last:
        rest, part = x.split([x.shape[-1] - rotated, rotated], dim=-1)
    else:
        part, rest = x.split([rotated, x.shape[-1] - rotated], dim=-1)
    if interleaved:
        cos, sin = cos[..., :half], sin[..., :half]
        first, second = part[..., 0::2], part[..., 1::2]
        part = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        turned = torch.cat((-part[..., half:], part[..., :half]), dim=-1)
        part = part * cos + turned * sin
    return torch.cat((rest, part) if last else (part, rest), dim=-1)


@triton.jit
def _rotate_kernel(
    out: tl.tensor,
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    BEGIN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """GROUP heads of one token. WIDE: products are in fp32, and only their sums are rounded.

    Else products are rounded, too, which LLVM would leave out where it may fuse them with their sum.
    """
    HALF: tl.constexpr = ROTATED // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    dim = tl.arange(0, DIM)
    place = dim - BEGIN
    turns = (place >= 0) & (place < ROTATED)
    is_first = place < HALF
    if INTERLEAVED:  # what stands at `place` of two halves comes from a pair of neighbours
        angle = tl.where(is_first, place, place - HALF)
        own = BEGIN + 2 * angle + tl.where(is_first, 0, 1)
        other = BEGIN + 2 * angle + tl.where(is_first, 1, 0)
    else:
        angle = place
        own = dim
        other = tl.where(is_first, dim + HALF, dim - HALF)
    inside = (head < HEADS)[:, None] & (dim < WIDTH)[None, :]
    row = (token * HEADS + head)[:, None] * WIDTH
    mine = tl.load(x + row + tl.where(turns, own, dim)[None, :], mask=inside, other=0.0)
    partner = tl.load(x + row + other[None, :], mask=inside & turns[None, :], other=0.0)
    c = tl.load(cos + token * ROTATED + angle, mask=turns, other=0.0)[None, :]
    s = tl.load(sin + token * ROTATED + angle, mask=turns, other=0.0)[None, :]
    kept = out.dtype.element_ty
    straight = mine.to(tl.float32) * c.to(tl.float32)
    across = partner.to(tl.float32) * s.to(tl.float32)
    if not WIDE:
        straight, across = straight.to(kept).to(tl.float32), across.to(kept).to(tl.float32)
    turned = (straight + tl.where(is_first[None, :], -across, across)).to(kept)
    tl.store(out + row + dim[None, :], tl.where(turns[None, :], turned, mine), mask=inside)
