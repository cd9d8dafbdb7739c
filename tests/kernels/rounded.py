"""A paged cache's content as `quire.kernels.formats.kv_format` rounds it."""

from __future__ import annotations

import torch
from paged import Paged

from quire.kernels.formats import fp8, fp12
from quire.kernels.formats.kv_format import elements_of, quantize, vectors_of

FP8, FP12 = fp8.DTYPE, fp12.DTYPE
POISON = {FP8: 0x7F, FP12: 0xFF}  # bytes that are NaN, if with a scale


def empty_vectors(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Vectors of a rounded dtype [*lead, block_size, D] that nothing was written to, as in a cache."""
    *lead, block_size, head_dim = shape
    memory = torch.full(
        (*lead, block_size * elements_of(head_dim, dtype)), POISON[dtype], dtype=torch.uint8, device=device
    )
    return vectors_of(memory.view(dtype), block_size, head_dim)


def in_format(paged: Paged, dtype: torch.dtype) -> tuple[Paged, torch.Tensor]:
    """The same in a rounded cache and its scales, strided as in a cache of two layers; NaN stays NaN."""
    vectors, scales = quantize(paged.kv, dtype)
    blocks, *rest = paged.kv.shape
    kv = empty_vectors((blocks, 2, *rest), dtype, paged.kv.device)[:, 1]
    kv.view(torch.uint8).copy_(vectors.view(torch.uint8))
    kv_scales = torch.stack((scales.permute(0, 2, 3, 1),) * 2, dim=1)[:, 1]
    keys, values = ([dequantized(part, dtype) for part in held] for held in (paged.keys, paged.values))
    return Paged(kv, paged.block_tables, paged.rows, paged.context_lens, keys, values), kv_scales


def dequantized(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x as a cache in dtype holds it, fp32."""
    vectors, scales = quantize(x, dtype)
    if dtype == FP12:
        return fp12.dequantize(vectors, scales)
    return vectors.float() * scales.float().unsqueeze(-1)
