"""From what a layer's projections gave to a cache of latents."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.layer_cache import LayerCache


def write_latents(latents: Tensor, slots: Tensor, cache: LayerCache) -> None:
    """Write latents [T, D], rows may be strided, to slots [T] of the cache; -1 writes nothing."""
    tokens, width = latents.shape
    if width != cache.kv.shape[-1] or latents.dtype != cache.kv.dtype:
        raise ValueError(
            f"latents of {width} numbers in {latents.dtype} do not go to a cache of {cache.kv.shape[-1]} in "
            f"{cache.kv.dtype}"
        )
    if tokens:
        _write_kernel[(tokens,)](
            latents, slots, cache.kv, latents.stride(0), cache.kv.stride(0), cache.kv.stride(3),
            BLOCK_SIZE=cache.block_size, WIDTH=width, PADDED=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip


def write_latents_reference(latents: Tensor, slots: Tensor, cache: LayerCache) -> None:
    """Do the same as `write_latents` in plain torch."""
    kept = slots >= 0
    places = slots[kept]
    cache.kv[places // cache.block_size, 0, 0, places % cache.block_size] = latents[kept]


@triton.jit
def _write_kernel(
    latents: tl.tensor,
    slots: tl.tensor,
    kv: tl.tensor,
    stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    column = tl.arange(0, PADDED)
    latent = tl.load(latents + token * stride + column, mask=column < WIDTH, other=0.0)
    place = kv + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    tl.store(place + column, latent, mask=(column < WIDTH) & (slot >= 0))
