"""What a cache may hold keys and values as, by its dtype: e4m3 as in `formats.fp8`, u8 planes as in
`formats.fp12`, any other as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.formats import fp8, fp12

ROUNDED = {"fp8_e4m3": fp8.DTYPE, "fp12_e4m7": fp12.DTYPE}  # by --kv-cache-dtype; these come with scales


def name_of(dtype: torch.dtype) -> str:
    """As `--kv-cache-dtype` and `--dtype` name it."""
    return {held: name for name, held in ROUNDED.items()}.get(dtype, str(dtype).removeprefix("torch."))


def elements_of(head_dim: int, dtype: torch.dtype) -> int:
    """How many of dtype a key or a value takes. Raises ValueError for head dims that it does not suit."""
    return fp12.vector_bytes(head_dim) if dtype == fp12.DTYPE else head_dim


def head_dim_of(kv: Tensor) -> int:
    """D of kv [blocks, 2, Hkv, block_size, D], or [blocks, 2, Hkv, block_size, 3, D/2] of planes."""
    return kv.shape[-1] * 2 if kv.dtype == fp12.DTYPE else kv.shape[-1]


def vectors_of(memory: Tensor, block_size: int, head_dim: int) -> Tensor:
    """memory [..., block_size · elements] of one head's block -> its vectors [..., block_size, D], or planes
    of vectors [..., block_size, 3, D/2], strided.
    """
    if memory.dtype == fp12.DTYPE:
        return memory.unflatten(-1, (3, block_size, head_dim // 2)).transpose(-3, -2)
    return memory.unflatten(-1, (block_size, head_dim))


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., D] -> (vectors [..., D], or [..., 3, D/2] of planes, of a rounded dtype, scales [...] fp16)."""
    return fp12.quantize(x) if dtype == fp12.DTYPE else fp8.quantize(x)


def read_cache(kv: Tensor, kv_scales: Tensor | None, index: tuple[Tensor, ...]) -> Tensor:
    """kv[index] in fp32 [..., block size, D], dequantised; index is (blocks, parts, kv heads)."""
    if kv_scales is None:
        return kv[index].float()
    blocks, parts, heads = index
    scales = kv_scales[blocks, heads, :, parts]
    if kv.dtype == fp12.DTYPE:
        return fp12.dequantize(kv[index], scales)
    return fp8.dequantize(kv.view(torch.uint8)[index], scales)


def check_kv_scales(kv: Tensor, kv_scales: Tensor | None) -> None:
    """Raise ValueError unless a rounded kv [blocks, 2, Hkv, block_size, ...], and no other, has scales."""
    if (kv.dtype in ROUNDED.values()) != (kv_scales is not None):
        raise ValueError(f"a cache in {kv.dtype} comes {'without' if kv_scales is None else 'with'} scales")
    if kv_scales is not None:
        expected, head_dim = (kv.shape[0], *kv.shape[2:4], 2), head_dim_of(kv)
        if kv_scales.shape != expected or kv_scales.dtype != torch.float16 or head_dim % 2:
            raise ValueError(
                f"scales must be fp16 of shape {expected} and head dims even, got {kv_scales.dtype} of "
                f"{tuple(kv_scales.shape)} and head dim {head_dim}"
            )
    if kv.dtype == fp12.DTYPE:
        strides = head_dim // 2, kv.shape[3] * head_dim // 2, 1
        if kv.dim() != 6 or kv.shape[4] != 3 or kv.stride()[3:] != strides:
            raise ValueError(
                f"planes must be [blocks, 2, Hkv, block_size, 3, D/2] with strides {strides} in the end, "
                f"got {tuple(kv.shape)} and {kv.stride()}; see quire.kernels.formats.kv_format.vectors_of"
            )


def check_expanded(kv: Tensor, expanded: Tensor | None) -> None:
    """Raise ValueError unless `expanded` is room for an fp12 kv's numbers, or None."""
    if expanded is None:
        return
    shape = (*kv.shape[:4], head_dim_of(kv))
    if kv.dtype != fp12.DTYPE or expanded.shape != shape or not expanded.is_contiguous():
        raise ValueError(
            f"a cache in {name_of(kv.dtype)} of {tuple(kv.shape)} does not expand into {expanded.dtype} of "
            f"{tuple(expanded.shape)}; that is for one in fp12_e4m7, and takes a contiguous tensor of shape "
            f"{shape}"
        )
