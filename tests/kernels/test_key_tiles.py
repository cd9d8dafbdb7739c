"""Tiles of attention: the best where a GPU has room for them, and smaller ones elsewhere."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from gpus import GPUS

from quire.kernels.attention.cascade import prefix_tiles
from quire.kernels.attention.decode import decode_tiles, has_room_for_new_heads
from quire.kernels.attention.key_tiles import KeyTiles
from quire.kernels.attention.prefill import prefill_tiles
from quire.kernels.formats.kv_format import BF16, FP8, FP12, FP16, FP32, KVFormat
from quire.kernels.gpu import NO_GPU, Gpu

HELD = [(BF16, BF16), (FP16, FP16), (FP32, FP32), *product((BF16, FP16, FP32), (FP8, FP12))]


@pytest.mark.parametrize("gpu", [GPUS[90], GPUS[100], NO_GPU], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("plain", "held"), HELD, ids=lambda held: held.name)
def test_with_227_kib_tiles_are_the_best(gpu: Gpu, dim: int, plain: KVFormat, held: KVFormat) -> None:
    """They are those that every figure in docs/benchmarks.md was measured with."""
    keys = 32 if dim == 256 and plain == FP32 else 64
    decoded = 2 * keys if held == FP8 and plain != FP32 else keys
    assert decode_tiles(gpu, 16, dim, plain.dtype, held) == KeyTiles(decoded, 4)
    assert prefix_tiles(gpu, dim, plain.dtype, held) == KeyTiles(keys, 3)
    for lanes in (64, 128) if dim * plain.dtype.itemsize <= 256 else (64,):
        assert prefill_tiles(gpu, lanes, dim, plain.dtype, held) == KeyTiles(keys, 2)


@pytest.mark.parametrize(
    ("capability", "plain", "held", "dim", "decode", "prefix", "prefill"),
    [
        (80, BF16, BF16, 128, (64, 4), (64, 3), (64, 2)),
        (80, BF16, BF16, 256, (64, 3), (64, 2), (64, 2)),
        (80, FP32, FP32, 128, (64, 3), (64, 2), (64, 2)),
        (86, BF16, BF16, 64, (64, 4), (64, 3), (64, 2)),
        (86, BF16, BF16, 128, (64, 3), (64, 3), (64, 2)),
        (86, BF16, FP12, 128, (64, 4), (64, 3), (64, 2)),
        (89, BF16, FP8, 128, (128, 3), (64, 3), (64, 2)),
        (120, BF16, BF16, 128, (64, 3), (64, 3), (64, 2)),
        (120, BF16, BF16, 256, (64, 2), (32, 2), (32, 2)),
        (120, FP32, FP32, 256, (32, 2), (16, 1), (16, 1)),
    ],
)
def test_with_less_fewer_keys_are_on_their_way(
    capability: int,
    plain: KVFormat,
    held: KVFormat,
    dim: int,
    decode: tuple[int, int],
    prefix: tuple[int, int],
    prefill: tuple[int, int],
) -> None:
    gpu = GPUS[capability]
    assert decode_tiles(gpu, 16, dim, plain.dtype, held) == KeyTiles(*decode)
    assert prefix_tiles(gpu, dim, plain.dtype, held) == KeyTiles(*prefix)
    assert prefill_tiles(gpu, 64, dim, plain.dtype, held) == KeyTiles(*prefill)


def test_too_little_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"A10 has 49152 bytes of shared memory .* 64 queries of 256"):
        prefix_tiles(replace(GPUS[86], shared_memory=49152), 256, FP32.dtype, FP32)


@pytest.mark.parametrize(
    ("capability", "room"), [(80, True), (86, False), (89, False), (90, True), (120, False)]
)
def test_heads_that_a_program_cannot_hold_twice_are_prepared_before(capability: int, room: bool) -> None:
    gpu = GPUS[capability]
    assert has_room_for_new_heads(gpu, 64, 256, FP32.dtype) == room
    assert has_room_for_new_heads(gpu, 64, 256, BF16.dtype)
    assert has_room_for_new_heads(gpu, 16, 256, FP32.dtype)
