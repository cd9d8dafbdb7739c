"""How large the tiles of keys are and how many are on their way at a time, by a GPU's shared memory.

For the attention kernels that Triton pipelines. What a program takes is reckoned here, and
tests/kernels/test_compile_gpus.py holds every choice against what the compiler allots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from quire.kernels.formats.kv_format import KVFormat
from quire.kernels.gpu import Gpu

LEAST_KEYS = 16  # of a product
WARPGROUP_LANES = 64  # from which on a product is one of four warps, where a GPU has such
SPARE_BYTES = 3072  # sums that warps exchange, and barriers


@dataclass(frozen=True, slots=True)
class KeyTiles:
    """keys in a tile, and stages as Triton counts them: one is used while stages − 1 are on their way."""

    keys: int
    stages: int


@cache
def key_tiles(
    gpu: Gpu,
    most: KeyTiles,
    lanes: int,
    dim: int,
    dtype: torch.dtype,
    held: KVFormat,
    *,
    paired: bool = False,
) -> KeyTiles:
    """Return the largest tiles, and of them as many, up to `most` each, as a program has room for.

    lanes queries of dim (padded) in dtype attend to keys and values as they are held; paired: those become
    numbers in registers. Two stages of a smaller tile come before one of a larger: with one nothing is on its
    way. Raises ValueError where no tile fits.
    """
    sizes = [keys for keys in (most.keys >> halvings for halvings in range(8)) if keys >= LEAST_KEYS]
    choices = [KeyTiles(keys, stages) for keys in sizes for stages in range(most.stages, 1, -1)]
    choices += [KeyTiles(keys, 1) for keys in sizes]
    for tiles in choices:
        if _program_bytes(gpu, tiles, lanes, dim, dtype, held, paired) <= gpu.shared_memory:
            return tiles
    raise ValueError(
        f"{gpu.name} has {gpu.shared_memory} bytes of shared memory for a program, too few to attend with "
        f"{lanes} queries of {dim} in {dtype} at a time"
    )


def _program_bytes(
    gpu: Gpu,
    tiles: KeyTiles,
    lanes: int,
    dim: int,
    dtype: torch.dtype,
    held: KVFormat,
    paired: bool,
) -> int:
    wide = dtype.itemsize == 4
    key_and_value = 2 * held.vector_bytes(dim)
    on_their_way = (tiles.stages - 1) * tiles.keys * key_and_value
    queries = lanes * dim * dtype.itemsize
    weights = lanes * (tiles.keys + 1) * dtype.itemsize
    numbers = tiles.keys * dim * dtype.itemsize  # of a tile's keys, or of its values
    if gpu.has_products_of_shared_memory and lanes >= WARPGROUP_LANES and not wide:
        used = 2 * numbers  # weights come from registers
    elif wide and (held.scaled or tiles.stages == 1):
        used = max(2 * numbers, numbers + weights)  # weights take the keys' place
    elif (held.scaled and not paired) or tiles.stages == 1:
        used = numbers + weights
    else:
        used = weights
    return on_their_way + queries + used + SPARE_BYTES
