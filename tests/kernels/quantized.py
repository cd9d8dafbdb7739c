"""A paged cache's content as `quire.kernels.formats.kv_format` rounds it."""

from __future__ import annotations

import torch
from paged import Paged

from quire.kernels.formats import fp12
from quire.kernels.formats.kv_format import FP8, FP12, KVFormat
from quire.kernels.formats.layer_cache import LayerCache

POISON = {FP8: 0x7F, FP12: 0xFF}  # bytes that are NaN, if with a scale


def empty_vectors(shape: tuple[int, ...], held: KVFormat, device: torch.device | str) -> torch.Tensor:
    """Vectors of a format [*lead, block_size, D] that nothing was written to, as in a cache."""
    *lead, block_size, head_dim = shape
    memory = torch.full(
        (*lead, block_size * held.elements(head_dim)), POISON[held], dtype=torch.uint8, device=device
    )
    return held.vectors(memory.view(held.dtype), block_size, head_dim)


def in_format(paged: Paged, held: KVFormat) -> tuple[Paged, LayerCache]:
    """The same in a rounded cache, strided as in a cache of two layers; NaN stays NaN."""
    vectors, scales = held.quantize(paged.kv)
    blocks, *rest = paged.kv.shape
    kv = empty_vectors((blocks, 2, *rest), held, paged.kv.device)[:, 1]
    kv.view(torch.uint8).copy_(vectors.view(torch.uint8))
    kv_scales = torch.stack((scales.permute(0, 2, 3, 1),) * 2, dim=1)[:, 1]
    keys, values = ([dequantized(part, held) for part in parts] for parts in (paged.keys, paged.values))
    rounded = Paged(kv, paged.block_tables, paged.rows, paged.context_lens, keys, values)
    return rounded, LayerCache(kv, held, kv_scales)


def dequantized(x: torch.Tensor, held: KVFormat) -> torch.Tensor:
    """x as a cache in that format holds it, fp32."""
    vectors, scales = held.quantize(x)
    if held == FP12:
        return fp12.dequantize(vectors, scales)
    return vectors.float() * scales.float().unsqueeze(-1)
