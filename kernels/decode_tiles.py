"""How tiles of keys and values come from the cache in `kernels.hopper_decode`, each warp's own keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

WARPS = gl.constexpr(4)


@gluon.jit
def find_keys(
    table: gl.tensor, tile: gl.tensor, last_key: gl.tensor, block_stride: gl.tensor, TILES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, DIM: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Where in the cache each warp's first key of a tile is; past the context anywhere: it is not read."""
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, TILES)))
    key = gl.minimum(tile * TILE + warp * (TILE // WARPS), last_key)
    block = gl.load(table + key // BLOCK_SIZE).to(gl.int64)
    return block * block_stride + key % BLOCK_SIZE * DIM


@gluon.jit
def ask_for_tile(
    kv: gl.tensor, keys: gl.shared_memory_descriptor, values: gl.shared_memory_descriptor, first: gl.tensor,
    tile: gl.tensor, cached_len: gl.tensor, part_stride: gl.tensor,
    TILES: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr,
) -> None:  # fmt: skip
    """Have K and V [WARPS, KEYS, DIM] of a tile copied to shared memory, each warp its own keys'.

    `first` [WARPS] is what `find_keys` gave for that `tile` of the context. Keys that the cache does not
    hold are zeros: what is in their place may be NaN, and costs time.
    """
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, TILES)))
    key = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, TILES)))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, TILES)))
    place = kv + (first[:, None, None] + (key * DIM)[None, :, None] + dim[None, None, :])
    held = ((tile * WARPS + warp) * KEYS)[:, None, None] + key[None, :, None] < cached_len
    held, _ = gl.broadcast(held, place)
    async_copy.async_copy_global_to_shared(keys, place, mask=held)
    async_copy.async_copy_global_to_shared(values, place + part_stride, mask=held)


@gluon.jit
def bring_tile(
    kv: gl.tensor, table: gl.tensor, tile: gl.tensor, last_key: gl.tensor, block_stride: gl.tensor,
    part_stride: gl.tensor, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, DIM: gl.constexpr,
) -> None:  # fmt: skip
    """Have K and V of a tile that the context fills brought to the L2 cache.

    There they miss nothing that a kernel ahead writes.
    """
    LINE: gl.constexpr = 64  # dims
    LINES: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1], [1, 32 * LINE // DIM, DIM // LINE], [WARPS, 1, 1], [2, 1, 0]
    )
    first = find_keys(table, tile, last_key, block_stride, LINES, BLOCK_SIZE, TILE, DIM)
    key = gl.arange(0, TILE // WARPS, gl.SliceLayout(0, gl.SliceLayout(2, LINES)))
    line = gl.arange(0, DIM // LINE, gl.SliceLayout(0, gl.SliceLayout(1, LINES)))
    place = kv + (first[:, None, None] + (key * DIM)[None, :, None] + (line * LINE)[None, None, :])
    for part in gl.static_range(2):
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(place + part * part_stride).to(gl.int64)],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
