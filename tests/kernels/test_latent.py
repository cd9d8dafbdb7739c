"""Attention to latents, vectors that are key and value at once: against fp64, and against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from paged import TOLERANCE, UNTOUCHED, Paged, attend_exactly, make_paged, poisoned_workspace, with_dtypes

from quire.kernels.attention.attend import attend_newest_reference, attend_reference
from quire.kernels.attention.batch import AttentionLayer, DecodeBatch, ForwardBatch, Newest, PrefillBatch
from quire.kernels.attention.latent.attend import attend_newest_to_latents, attend_to_latents
from quire.kernels.attention.latent.decode import decode_latents
from quire.kernels.attention.latent.prefill import prefill_latents
from quire.kernels.attention.latent.tile import latent_tiles
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import KNOWN

# (heads, value, behind it, block size, window)
SHAPES = [
    (4, 32, 8, 16, 0),
    (16, 24, 16, 32, 0),  # a value that is no power of two
    (6, 16, 4, 16, 20),
    (70, 32, 8, 64, 0),  # more heads than a program takes
    (1, 64, 32, 4, 0),
]
LENGTHS = [37, 0, 1, 70]


def made(shape: tuple[int, ...], lengths: list[int], dtype: torch.dtype, device: torch.device) -> Paged:
    """A cache of random latents, whose first numbers are their values; what is beside them is NaN."""
    _, latent, rest, block_size, _ = shape
    paged = make_paged(lengths, 1, latent + rest, block_size, dtype, device)
    paged.values = [keys[..., :latent] for keys in paged.keys]
    return paged


def cache_of(paged: Paged, latent: int) -> LayerCache:
    return LayerCache(paged.kv[:, :1], UNSCALED[paged.kv.dtype], latent=latent)


def layer_of(shape: tuple[int, ...], sinks: torch.Tensor | None = None) -> AttentionLayer:
    heads, latent, rest, _, window = shape
    return AttentionLayer(heads, 1, latent + rest, 0.21, window, sinks=sinks, latent=latent)


def exactly(q: torch.Tensor, paged: Paged, row: int, window: int) -> torch.Tensor:
    return attend_exactly(q, paged.keys[row], paged.values[row], 0.21, window)


@pytest.mark.parametrize(
    ("shape", "splits", "dtype"),
    with_dtypes((shape, splits) for shape, splits in zip(SHAPES, (None, 3, 2, 1, 64), strict=True)),
)
def test_decode(shape: tuple[int, ...], splits: int | None, dtype: torch.dtype, device: torch.device) -> None:
    heads, latent, rest, _, window = shape
    paged = made(shape, LENGTHS, dtype, device)
    q = torch.randn(len(LENGTHS), heads, latent + rest).to(dtype)
    out = torch.full((len(LENGTHS), heads, latent), UNTOUCHED, dtype=dtype, device=device)
    order = torch.tensor([3, 0, 2, 1], dtype=torch.int32, device=device)
    batch = paged.decodes(order, poisoned_workspace(len(LENGTHS), heads, latent, device))
    decode_latents(q.to(device), out, batch, layer_of(shape), cache_of(paged, latent), splits)
    assert (out[1] == UNTOUCHED).all()
    for row in (0, 2, 3):
        expected = exactly(q[row : row + 1], paged, row, window).to(dtype)
        torch.testing.assert_close(out[row : row + 1].cpu(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize(("shape", "dtype"), with_dtypes((shape,) for shape in SHAPES))
def test_prefill(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    heads, latent, rest, _, window = shape
    paged = made(shape, LENGTHS, dtype, device)
    sizes = [7, 2, 1, 40]  # of which the second pads
    starts = torch.tensor([1, 8, 10, 11, 51])  # behind a decode
    q = torch.randn(51, heads, latent + rest).to(dtype)
    out = torch.full((51, heads, latent), UNTOUCHED, dtype=dtype, device=device)
    batch = paged.prefills(starts.int().to(device), max(sizes))
    prefill_latents(q.to(device), out, batch, layer_of(shape), cache_of(paged, latent))
    assert (out[0] == UNTOUCHED).all() and not out[8:10].any()
    for row in (0, 2, 3):
        begin, end = int(starts[row]), int(starts[row + 1])
        expected = exactly(q[begin:end], paged, row, window).to(dtype)
        torch.testing.assert_close(out[begin:end].cpu(), expected, atol=TOLERANCE[dtype], rtol=0)


class Step(NamedTuple):
    """Two decodes, one of which pads, and a chunk of five tokens, whose latents are still to be written."""

    paged: Paged
    qkv: torch.Tensor
    batch: ForwardBatch
    layer: AttentionLayer

    def cache(self) -> LayerCache:
        paged = replace(self.paged, kv=self.paged.kv.clone())
        return cache_of(paged, self.layer.latent)


def step(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, newest: bool) -> Step:
    heads, latent, rest, block_size, _ = shape
    paged = made(shape, [33, 0, 20], dtype, device)
    tables, rows, lens = paged.block_tables, paged.rows, paged.context_lens
    places = [(0, 32), *((2, position) for position in range(15, 20))]
    slots = [
        int(tables[rows[row], position // block_size]) * block_size + position % block_size
        for row, position in places
    ]
    workspace = poisoned_workspace(4, heads, latent, device)

    def decodes(of: slice) -> DecodeBatch:
        count = len(rows[of])
        order = torch.arange(count, dtype=torch.int32, device=device)
        return DecodeBatch(tables, rows[of], lens[of], order, workspace)

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    batch = ForwardBatch(
        tokens=int32([0] * 7),
        positions=int32([32, 0, *range(15, 20)]),
        slots=torch.tensor([slots[0], -1, *slots[1:]], device=device),
        decode=decodes(slice(0, 2)),
        prefill=PrefillBatch(tables, rows[2:], int32([2, 7]), lens[2:], 5),
        newest=Newest(int32([0, 1, 6]), decodes(slice(0, 3))) if newest else None,
    )
    qkv = torch.randn(7, (heads + 1) * (latent + rest)).to(device, dtype)
    sinks = torch.randn(heads).to(device, dtype)
    return Step(paged, qkv, batch, layer_of(shape, sinks))


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]])
def test_a_step_equals_the_reference(
    shape: tuple[int, ...], newest: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """With sinks; the latents of its own tokens are written first, and padding writes none."""
    made_step = step(shape, dtype, device, newest=newest)
    by, reference = (
        (attend_newest_to_latents, attend_newest_reference)
        if newest
        else (attend_to_latents, attend_reference)
    )
    caches = made_step.cache(), made_step.cache()
    got, expected = (
        each(made_step.qkv.clone(), made_step.batch, made_step.layer, cache)
        for each, cache in zip((by, reference), caches, strict=True)
    )
    there = [0, 2] if newest else [0, *range(2, 7)]  # nobody looks at what pads
    torch.testing.assert_close(got[there], expected[there], atol=TOLERANCE[dtype], rtol=0)
    assert torch.equal(*(cache.kv.nan_to_num(9.0) for cache in caches))
    assert not torch.equal(caches[0].kv.nan_to_num(9.0), made_step.paged.kv[:, :1].nan_to_num(9.0))


@pytest.mark.parametrize("gpu", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_gpu_has_room_for_tiles_of_latents_as_they_are(gpu, dtype: torch.dtype) -> None:
    for heads in (1, 16, 20, 128):
        for rows in (1, 4, 64):
            tiles = latent_tiles(gpu, heads, rows, 576, 512, dtype)
            assert tiles.group <= tiles.lanes and tiles.head_blocks(heads) * tiles.group >= heads


def test_tiles_are_those_that_were_quickest_on_hopper() -> None:
    """Others keep what they had: it was not measured there."""

    def shape(name: str, heads: int, rows: int, *, few: bool = False) -> tuple[int, ...]:
        tiles = latent_tiles(KNOWN[name], heads, rows, 576, 512, torch.bfloat16, few=few)
        return tiles.lanes, tiles.keys, tiles.stages, tiles.warps

    assert shape("H100", 16, 8192) == shape("H100", 128, 8192) == shape("H100", 128, 1) == (64, 64, 2, 8)
    assert shape("H100", 16, 1) == (16, 32, 3, 4) and shape("H100", 16, 1, few=True) == (16, 64, 3, 8)
    assert shape("A100", 16, 8192) == (64, 32, 3, 8) and shape("A100", 16, 1, few=True) == (16, 32, 3, 4)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    shape = SHAPES[0]
    made_step = step(shape, torch.float32, device, newest=False)
    wide = replace(made_step.layer, num_heads=5)
    with pytest.raises(ValueError, match="has 200 columns, expected 5 heads of 40"):
        attend_to_latents(made_step.qkv, made_step.batch, wide, made_step.cache())
    whole = LayerCache(made_step.paged.kv, UNSCALED[torch.float32], latent=32)
    with pytest.raises(ValueError, match="a cache of 2 vectors of a head in float32 is none with a latent"):
        attend_to_latents(made_step.qkv, made_step.batch, made_step.layer, whole)
