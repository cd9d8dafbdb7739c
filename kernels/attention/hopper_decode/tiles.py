"""How tiles of keys and values come from the cache in `attention.hopper_decode.decode`, each warp's own keys.

Of 16-bit numbers, or of the planes of `formats.fp12` as 16-bit words (PLANES): these are staged as they are,
and become numbers in `attention.hopper_decode.products`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

WARPS = gl.constexpr(4)
# Dimensions of a head that are multiplied at once: with more a thread has too few registers.
WIDEST = gl.constexpr(128)


@gluon.jit
def allocate_stages(
    dtype: gl.constexpr, STAGES: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, PIECES: gl.constexpr
) -> gl.tuple:  # fmt: skip
    """Shared memory for the keys, the values and of planes (4 PIECES) the scales of so many tiles."""
    if PIECES == 4:
        PLANE: gl.constexpr = gl.SwizzledSharedLayout(8, 256 // DIM, DIM // 32, [2, 1, 0])
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        stages: gl.tuple = ()
        for _ in gl.static_range(6):  # apart: of copies to one, each would wait for the one before
            stages += (gl.allocate_shared_memory(gl.int16, [STAGES, WARPS, KEYS, DIM // 4], PLANE),)
        stages += (gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, KEYS], FLAT),)
        return stages
    else:
        WHOLE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
        pieces: gl.tuple = ()  # of keys, then of values
        for _ in gl.static_range(2 * PIECES):
            pieces += (gl.allocate_shared_memory(dtype, [STAGES, WARPS, KEYS, DIM // PIECES], WHOLE),)
        return pieces


@gluon.jit
def find_keys(
    table: gl.tensor, tile: gl.tensor, last_key: gl.tensor, strides: gl.tuple, TILES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, PITCH: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """Where in the cache, and where among scales, each warp's first key of a tile is.

    Past the context anywhere: it is not read. `strides` are those of a block, here and there.
    """
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, TILES)))
    key = gl.minimum(tile * TILE + warp * (TILE // WARPS), last_key)
    block = gl.load(table + key // BLOCK_SIZE).to(gl.int64)
    slot = key % BLOCK_SIZE
    return block * strides[0] + slot * PITCH, block * strides[1] + slot


@gluon.jit
def ask_for_tile(
    kv: gl.tensor, scales: gl.tensor, stages: gl.tuple, stage: gl.tensor, first: gl.tuple, tile: gl.tensor,
    cached_len: gl.tensor, part_stride: gl.tensor, TILES: gl.constexpr, KEYS: gl.constexpr,
    WIDTH: gl.constexpr, PITCH: gl.constexpr, BLOCK_SIZE: gl.constexpr, PLANES: gl.constexpr,
    VALUES: gl.constexpr = None,
) -> None:  # fmt: skip
    """Have a tile copied to a stage of shared memory, each warp its own keys'.

    `first` is what `find_keys` gave for that `tile` of the context. Keys that the cache does not hold are
    zeros: what is in their place may be NaN, and costs time.
    VALUES: of heads in halves only these (1), or only keys (0).
    """
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, TILES)))
    key = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, TILES)))
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, TILES)))
    place = kv + (first[0][:, None, None] + (key * PITCH)[None, :, None] + dim[None, None, :])
    key_held = ((tile * WARPS + warp) * KEYS)[:, None] + key[None, :] < cached_len
    held, _ = gl.broadcast(key_held[:, :, None], place)
    if VALUES is not None:
        for half in gl.static_range(2):
            real = held
            if (half + 1) * WIDTH > PITCH:
                real &= (dim < PITCH - half * WIDTH)[None, None, :]
            there = place + VALUES * part_stride + half * WIDTH
            async_copy.async_copy_global_to_shared(stages[2 * VALUES + half].index(stage), there, mask=real)
    else:
        if PITCH < WIDTH:
            held &= (dim < PITCH)[None, None, :]
        if PLANES:
            for plane in gl.static_range(3):
                there = place + plane * (BLOCK_SIZE * PITCH)
                async_copy.async_copy_global_to_shared(stages[plane].index(stage), there, mask=held)
                there += part_stride
                async_copy.async_copy_global_to_shared(stages[3 + plane].index(stage), there, mask=held)
            scale = scales + (first[1][:, None] + key[None, :])
            async_copy.async_copy_global_to_shared(stages[6].index(stage), scale, mask=key_held)
        else:
            async_copy.async_copy_global_to_shared(stages[0].index(stage), place, mask=held)
            async_copy.async_copy_global_to_shared(stages[1].index(stage), place + part_stride, mask=held)


@gluon.jit
def bring_tile(
    kv: gl.tensor, table: gl.tensor, tile: gl.tensor, last_key: gl.tensor, strides: gl.tuple,
    part_stride: gl.tensor, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, WIDTH: gl.constexpr,
    PITCH: gl.constexpr, PLANES: gl.constexpr,
) -> None:  # fmt: skip
    """Have K and V of a tile that the context fills brought to the L2 cache.

    There they miss nothing that a kernel ahead writes.
    """
    PIECES: gl.constexpr = 3 if PLANES else 1
    LINE: gl.constexpr = min(WIDTH, 64)  # in 16 bits
    LINES: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1], [1, 32 * LINE // WIDTH, WIDTH // LINE], [WARPS, 1, 1], [2, 1, 0]
    )
    first = find_keys(table, tile, last_key, strides, LINES, BLOCK_SIZE, TILE, PITCH)
    key = gl.arange(0, TILE // WARPS, gl.SliceLayout(0, gl.SliceLayout(2, LINES)))
    line = gl.arange(0, WIDTH // LINE, gl.SliceLayout(0, gl.SliceLayout(1, LINES)))
    if PITCH <= WIDTH - LINE:  # the last line would be another key's
        line = gl.minimum(line, (PITCH - 1) // LINE)
    place = kv + (first[0][:, None, None] + (key * PITCH)[None, :, None] + (line * LINE)[None, None, :])
    for part in gl.static_range(2):
        for plane in gl.static_range(PIECES):
            there = place + part * part_stride + plane * (BLOCK_SIZE * PITCH)
            gl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [there.to(gl.int64)],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
