"""From the fused QKV projection to the cache: per-head QK-norm, rotary embedding, and the KV write.

RoPE (Su et al. 2021) pairs dimension i with i + D/2 and is applied in fp32, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.attention.batch import AttentionLayer
from quire.kernels.formats import fp8, fp12
from quire.kernels.formats.kv_scales import is_broken
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.launch import dependent_launch
from quire.kernels.pointwise.norm import rms_norm_reference, times_weight

HEADS = 8  # heads of a token that one program handles


def write_kv(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    layer: AttentionLayer,
    cache: LayerCache,
    *,
    dequantize: bool = False,
) -> None:
    """Rewrite q inside qkv, and write k and v to the cache; their parts of qkv are left as they were.

    qkv [T, (Hq + 2 Hkv) D], rows may be strided; positions [T]; slots [T], -1 writes nothing. With
    `dequantize` what a cache in fp12 holds of the tokens goes to `cache.dequantized` as numbers, too, if that
    is there. Raises ValueError if the shapes do not fit. All but qkv is read before kernels ahead have ended:
    it must be complete when the kernel just ahead begins.
    """
    kv, scales, dequantized = _checked(cache, dequantize=dequantize)
    head_dim, heads = cache.head_dim, layer.num_heads + 2 * cache.kv_heads
    tokens, width = qkv.shape
    if width != heads * head_dim:
        raise ValueError(f"qkv has {width} columns, expected {heads} heads of {head_dim}")
    if tokens == 0:
        return
    _qkv_to_cache_kernel[(tokens, triton.cdiv(heads, HEADS))](
        qkv, positions, slots, kv, layer.rope, layer.q_norm, layer.k_norm,
        qkv.stride(0), *kv.stride()[:4], scales, 0 if scales is None else scales.stride(0),
        dequantized, layer.eps, layer.num_heads, cache.kv_heads, cache.block_size,
        head_dim // 2, triton.next_power_of_2(head_dim // 2), HEADS, bool(cache.format.planes),
        num_warps=4, **dependent_launch(qkv.device),
    )  # fmt: skip


def write_kv_reference(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    layer: AttentionLayer,
    cache: LayerCache,
    *,
    dequantize: bool = False,
) -> None:
    """Do the same as `write_kv` in plain torch."""
    kv, kv_scales, dequantized = _checked(cache, dequantize=dequantize)
    block_size, head_dim = cache.block_size, cache.head_dim
    num_q_heads, kv_heads = layer.num_heads, cache.kv_heads
    rope, q_norm, k_norm, eps = layer.rope, layer.q_norm, layer.k_norm, layer.eps
    heads = qkv.unflatten(-1, (-1, head_dim))
    qk, v = heads[:, : num_q_heads + kv_heads], heads[:, num_q_heads + kv_heads :]  # with a latent v is none
    if q_norm is not None and k_norm is not None:
        q, k = qk.split([num_q_heads, kv_heads], dim=1)
        qk = torch.cat((rms_norm_reference(q, q_norm, eps), rms_norm_reference(k, k_norm, eps)), dim=1)
    if rope is not None:
        qk = rotate(qk, rope[positions].unsqueeze(1))
    if q_norm is not None or rope is not None:
        heads[:, :num_q_heads] = qk[:, :num_q_heads]
    k = qk[:, num_q_heads:]
    written = k[:, None] if cache.latent else torch.stack((k, v), dim=1)

    padding = slots < 0
    if padding.any():
        slots, written = slots[~padding], written[~padding]
    block, offset = slots // block_size, slots % block_size
    if kv_scales is None:
        kv[block, :, :, offset] = written
    else:
        values, scales = cache.format.quantize(written)
        kv.view(torch.uint8)[block, :, :, offset] = values.view(torch.uint8)
        kv_scales[block, :, offset] = scales.mT
        if dequantized is not None:
            dequantized[block, :, :, offset] = cache.format.dequantize(values, scales).to(dequantized.dtype)


def _checked(cache: LayerCache, *, dequantize: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the cache's vectors, its scales, and where numbers go."""
    cache.check()
    cache.check_dequantized()
    return cache.kv, cache.scales, cache.dequantized if dequantize else None


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Rotate heads [..., D] by cosines and sines, halves of a table [..., D], in plain torch."""
    cos, sin = table.chunk(2, dim=-1)
    first, second = heads.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(heads.dtype)


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("positions_ptr", "slots_ptr", "rope_ptr"))


@triton.jit
def _qkv_to_cache_kernel(
    qkv_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    rope_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    kv_block_stride: tl.tensor,
    kv_part_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    kv_offset_stride: tl.tensor,
    kv_scales_ptr: tl.tensor,
    scales_block_stride: tl.tensor,
    dequantized_ptr: tl.tensor,
    eps: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # of the head dimension
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    PLANES: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, HALF_PADDED)[None, :]
    is_q = head < Q_HEADS
    is_qk = head < Q_HEADS + KV_HEADS
    in_head = column < HALF
    inside = (head < Q_HEADS + 2 * KV_HEADS) & in_head

    if rope_ptr is not None:
        angle = rope_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + column
        cos = tl.load(angle, in_head, other=0.0)
        sin = tl.load(angle + HALF, in_head, other=0.0)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()  # qkv is the kernel's just ahead; what was read so far was there before that one began

    source = qkv_ptr + token * qkv_stride + head * (2 * HALF) + column
    first = tl.load(source, inside, other=0.0)
    second = tl.load(source + HALF, inside, other=0.0)
    if q_norm_ptr is not None:
        first_wide, second_wide = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(first_wide * first_wide + second_wide * second_wide, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        weight = tl.where(is_q, q_norm_ptr + column, k_norm_ptr + column)
        first_weight = tl.load(weight, inside & is_qk, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + HALF, inside & is_qk, other=0.0).to(tl.float32)
        WIDE: tl.constexpr = q_norm_ptr.dtype.element_ty == tl.float32
        first_normed = times_weight(first_wide * scale, first_weight, first.dtype, WIDE)
        second_normed = times_weight(second_wide * scale, second_weight, first.dtype, WIDE)
        first = tl.where(is_qk, first_normed, first)
        second = tl.where(is_qk, second_normed, second)
    if rope_ptr is not None:
        first_wide, second_wide = first.to(tl.float32), second.to(tl.float32)
        first_rotated = (first_wide * cos - second_wide * sin).to(first.dtype)
        second_rotated = (second_wide * cos + first_wide * sin).to(first.dtype)
        first = tl.where(is_qk, first_rotated, first)
        second = tl.where(is_qk, second_rotated, second)

    tl.store(source, first, inside & is_q)
    tl.store(source + HALF, second, inside & is_q)
    if (slot >= 0) & ((tl.program_id(1) + 1) * HEADS > Q_HEADS):  # to round q for nothing takes time
        kv_head = tl.where(is_qk, head - Q_HEADS, head - Q_HEADS - KV_HEADS)
        vector = (
            kv_ptr
            + (slot // BLOCK_SIZE) * kv_block_stride
            + (slot % BLOCK_SIZE) * kv_offset_stride
            + (head >= Q_HEADS + KV_HEADS).to(tl.int64) * kv_part_stride
            + kv_head * kv_head_stride
        )
        target = vector + column
        is_kv = inside & (head >= Q_HEADS)
        if kv_scales_ptr is None:
            tl.store(target, first, is_kv)
            tl.store(target + HALF, second, is_kv)
        else:
            x, y = first.to(tl.float32), second.to(tl.float32)
            BEYOND: tl.constexpr = fp12.BEYOND_BITS if PLANES else fp8.BEYOND_BITS
            broken = tl.max(is_broken(x, BEYOND) | is_broken(y, BEYOND), axis=1, keep_dims=True) > 0
            if PLANES:
                x, y = fp12.nearest_bf16(x), fp12.nearest_bf16(y)
            peak = tl.max(tl.maximum(tl.abs(x), tl.abs(y)), axis=1, keep_dims=True)
            if PLANES:
                kv_scale, inverse = fp12.scale_of(peak)
                x, y = fp12.as_held(x * inverse), fp12.as_held(y * inverse)
                is_head = (head >= Q_HEADS) & (head < Q_HEADS + 2 * KV_HEADS)
                planes = vector.to(tl.pointer_type(tl.int16))
                fp12.store_planes(planes, fp12.to_words(x), fp12.to_words(y), is_head, HALF, BLOCK_SIZE)
            else:
                kv_scale, inverse = fp8.scale_of(peak)
                tl.store(target, fp8.to_e4m3(x * inverse), is_kv)
                tl.store(target + HALF, fp8.to_e4m3(y * inverse), is_kv)
            kv_scale = tl.where(broken, float("nan"), kv_scale)
            if dequantized_ptr is not None:
                part = (slot // BLOCK_SIZE) * 2 + (head >= Q_HEADS + KV_HEADS)
                place = (part * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
                numbers = dequantized_ptr + place * (2 * HALF) + column
                number_scale = kv_scale.to(tl.float32)
                tl.store(numbers, (x * number_scale).to(dequantized_ptr.dtype.element_ty), is_kv)
                tl.store(numbers + HALF, (y * number_scale).to(dequantized_ptr.dtype.element_ty), is_kv)
            scale_target = (
                kv_scales_ptr
                + (slot // BLOCK_SIZE) * scales_block_stride
                + (kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * 2
                + (head >= Q_HEADS + KV_HEADS).to(tl.int64)
            )
            tl.store(scale_target, kv_scale, (head >= Q_HEADS) & (head < Q_HEADS + 2 * KV_HEADS))
