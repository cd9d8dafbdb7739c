"""Caches that hold rounded keys and values: written bit by bit, and attention over them against fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from paged import (
    TOLERANCE,
    UNTOUCHED,
    attend_exactly,
    attention_layer,
    decode_exactly,
    fused_queries,
    make_paged,
    poisoned_workspace,
    share_prefixes,
    with_dtypes,
)
from quantized import FP8, FP12, POISON, dequantized, empty_vectors, in_format
from test_shared_prefix import cascade_of, members_of

from quire.kernels.attention.cascade import SharedPrefixes, rows_of_cascade, shared_lens
from quire.kernels.attention.decode import decode
from quire.kernels.attention.decode_reference import decode_reference
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.attention.prefill import prefill, prefill_reference
from quire.kernels.attention.write_kv import write_kv, write_kv_reference
from quire.kernels.formats.kv_format import FP32, UNSCALED, KVFormat
from quire.kernels.formats.layer_cache import LayerCache


@pytest.mark.parametrize(
    ("held", "q_heads", "kv_heads", "head_dim"),
    [
        (FP8, 16, 8, 64),
        (FP8, 14, 2, 80),
        (FP8, 3, 3, 96),
        (FP8, 4, 1, 128),
        (FP12, 16, 8, 64),
        (FP12, 3, 3, 32),
        (FP12, 4, 1, 128),
    ],
)
@pytest.mark.parametrize("rotates", [True, False])
def test_the_write_is_what_the_full_precision_write_quantised_gives(
    held: KVFormat,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotates: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    block_size, tokens = 16, 4
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * head_dim, generator=generator).to(device, dtype)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    slots = torch.tensor([0, 4 * block_size + 15, 35, -1], device=device)
    rope = torch.rand(tokens, head_dim, generator=generator).to(device) if rotates else None
    shape = (5, 2, 2, kv_heads, block_size, head_dim)
    exact = torch.zeros(shape, dtype=dtype, device=device)[:, 1]
    layer = attention_layer(q_heads, kv_heads, head_dim, rope=rope, eps=1e-6)
    write_kv(qkv.clone(), positions, slots, layer, LayerCache(exact, UNSCALED[dtype]))
    values, scales = held.quantize(exact)
    unwritten = torch.full((5, block_size), True)
    unwritten[(slots[:3] // block_size).cpu(), (slots[:3] % block_size).cpu()] = False
    for write in (write_kv, write_kv_reference):
        cache = empty_vectors(shape, held, device)
        cache_scales = torch.full((5, 2, kv_heads, block_size, 2), torch.nan, device=device).half()
        write(qkv.clone(), positions, slots, layer, LayerCache(cache[:, 1], held, cache_scales[:, 1]))
        written, written_scales = cache[:, 1].view(torch.uint8).cpu(), cache_scales[:, 1].cpu()
        for block, offset in [(0, 0), (4, 15), (2, 3)]:
            at = (block, slice(None), slice(None), offset)
            assert torch.equal(written[at], values.cpu().view(torch.uint8)[at])
            assert torch.equal(written_scales[block, :, offset].mT, scales.cpu()[at])
        assert (written.movedim(3, 1)[unwritten] == POISON[held]).all()
        assert written_scales.permute(0, 2, 1, 3)[unwritten].isnan().all()
        assert (cache[:, 0].view(torch.uint8) == POISON[held]).all() and cache_scales[:, 0].isnan().all()


@pytest.mark.parametrize("write", [write_kv, write_kv_reference])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(14, 5, 32), (4, 1, 128)])
def test_what_an_fp12_cache_holds_is_written_as_numbers_too(
    write: Callable[..., None],
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Numbers too small for it and a NaN among them; nothing for padding."""
    heads = torch.randn(4, q_heads + 2 * kv_heads, head_dim, generator=torch.Generator().manual_seed(0))
    heads *= torch.logspace(-6, 0, head_dim)
    heads[1, -1, 3] = torch.nan
    shape = (3, 2, kv_heads, 16, head_dim)
    kv, dequantized = (
        empty_vectors(shape, FP12, device),
        torch.full(shape, UNTOUCHED, dtype=dtype, device=device),
    )
    kv_scales = torch.ones(3, kv_heads, 16, 2, dtype=torch.float16, device=device)
    slots = torch.tensor([0, 2 * 16 + 15, 18, -1], device=device)
    cache = LayerCache(kv, FP12, kv_scales, dequantized)
    layer = attention_layer(q_heads, kv_heads, head_dim, eps=1e-6)
    qkv = heads.flatten(1).to(device, dtype)
    write(qkv, slots.int().clamp(min=0), slots, layer, cache, dequantize=True)
    blocks, parts = torch.arange(3, device=device)[:, None, None], torch.arange(2, device=device)[:, None]
    read = cache.read((blocks, parts, torch.arange(kv_heads, device=device))).to(dtype)
    written = torch.zeros(3, 16, dtype=torch.bool, device=device)
    written[slots[:3] // 16, slots[:3] % 16] = True
    torch.testing.assert_close(
        dequantized.movedim(3, 1)[written], read.movedim(3, 1)[written], rtol=0, atol=0, equal_nan=True
    )
    assert (dequantized.movedim(3, 1)[~written] == UNTOUCHED).all()
    assert dequantized[2, 1, -1, 15].isnan().all()


def test_numbers_go_where_there_is_room_for_them() -> None:
    planes = empty_vectors((3, 2, 1, 16, 64), FP12, "cpu")
    LayerCache(planes, FP12).check_dequantized()
    LayerCache(planes, FP12, dequantized=torch.zeros(3, 2, 1, 16, 64)).check_dequantized()
    for room in (torch.zeros(2, 2, 1, 16, 64), torch.zeros(3, 2, 1, 16, 32), torch.zeros(3, 2, 1, 64, 16).mT):
        with pytest.raises(
            ValueError, match=r"fp12_e4m7 of .* does not dequantize .* of shape \(3, 2, 1, 16, 64\)"
        ):
            LayerCache(planes, FP12, dequantized=room).check_dequantized()
    with pytest.raises(ValueError, match=r"a cache in float32 .* that is for one in fp12_e4m7"):
        LayerCache(
            torch.zeros(3, 2, 1, 16, 64), FP32, dequantized=torch.zeros(3, 2, 1, 16, 64)
        ).check_dequantized()


@pytest.mark.parametrize("held", [FP8, FP12])
@pytest.mark.parametrize("write", [write_kv, write_kv_reference])
@pytest.mark.parametrize("large", [-torch.inf, 3e7, 65408.0])
def test_a_vector_that_its_format_cannot_hold_is_read_as_nan(
    write: Callable[..., None], held: KVFormat, large: float, dtype: torch.dtype, device: torch.device
) -> None:
    """One number of a key, one of a value's second half, and all of a key; a value with a large number."""
    if held == FP8 and large == 65408.0:
        large = 448 * 65504.0 + 4
    heads = torch.ones(3, 4, 64)  # of q, q, k, v
    heads[0, 2, 5] = heads[1, 3, 40] = heads[2, 2] = torch.nan
    heads[2, 3, 7] = large
    kv = empty_vectors((1, 2, 1, 16, 64), held, device)
    kv_scales = torch.zeros(1, 1, 16, 2, dtype=torch.float16, device=device)
    slots = torch.arange(3, device=device)
    cache = LayerCache(kv, held, kv_scales)
    qkv = heads.flatten(1).to(device, dtype)
    write(qkv, slots.int(), slots, attention_layer(2, 1, 64, eps=1e-6), cache)
    index = (
        torch.zeros(1, 1, dtype=torch.long, device=device),
        torch.arange(2, device=device)[:, None],
        slots[:1],
    )
    read = cache.read(index)[:, 0, :3]
    expected = torch.ones(2, 3, 64)
    expected[0, 0] = expected[1, 1] = expected[:, 2] = torch.nan
    torch.testing.assert_close(read.cpu(), expected, atol=1e-3, rtol=0, equal_nan=True)


# Held as, q heads, kv heads, head dim, block size, window.
Shape = tuple[KVFormat, int, int, int, int, int]
SHAPES: list[Shape] = [
    (FP8, 4, 2, 80, 32, 0),
    (FP8, 4, 1, 128, 16, 0),
    (FP8, 7, 1, 96, 128, 20),
    (FP12, 4, 2, 32, 32, 0),
    (FP12, 4, 1, 128, 16, 0),
    (FP12, 7, 1, 64, 128, 20),
    (FP8, 4, 2, 80, 1, 0),
    (FP8, 4, 1, 128, 8, 20),
    (FP12, 4, 2, 32, 1, 0),
    (FP12, 4, 1, 64, 4, 20),
]
SEQUENCES = [(1, 1), (0, 5), (5, 70), (33, 150), (1, 64), (0, 0), (16, 31)]


@pytest.mark.parametrize("attention", [prefill, prefill_reference])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill(
    attention: Callable[..., None],
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    held, heads, kv_heads, head_dim, block_size, window = shape
    torch.manual_seed(0)
    query_lens, context_lens = (list(lengths) for lengths in zip(*SEQUENCES, strict=True))
    exact_cache = make_paged(context_lens, kv_heads, head_dim, block_size, dtype, device)
    paged, cache = in_format(exact_cache, held)
    q = fused_queries(sum(query_lens), heads, head_dim, dtype).to(device)
    out = torch.empty(q.shape, dtype=dtype, device=device)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(device)
    layer = attention_layer(heads, kv_heads, head_dim, window)
    attention(q, out, paged.prefills(starts, max(query_lens)), layer, cache)
    exact = [
        attend_exactly(x, k, v, head_dim**-0.5, window)
        for x, k, v in zip(q.split(query_lens), paged.keys, paged.values, strict=True)
    ]
    torch.testing.assert_close(out.cpu().double(), torch.cat(exact), atol=TOLERANCE[dtype], rtol=0)


# In the interpreter every other one is divided.
@pytest.mark.parametrize(
    ("shape", "max_splits", "dtype"),
    with_dtypes(
        (shape, splits)
        for i, shape in enumerate(SHAPES)
        for splits in ((1, 2) if torch.cuda.is_available() else (1 + i // 2 % 2,))
    ),
)
def test_decode(
    shape: Shape,
    max_splits: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    held, heads, kv_heads, head_dim, block_size, window = shape
    torch.manual_seed(0)
    lengths = [0, 1, 64, 127, 128, 129, 200]
    exact_cache = make_paged(lengths, kv_heads, head_dim, block_size, dtype, device)
    paged, cache = in_format(exact_cache, held)
    q = fused_queries(len(lengths), heads, head_dim, dtype).to(device)
    order = torch.randperm(len(lengths)).int().to(device)
    expected = decode_exactly(q, paged, window)
    layer = attention_layer(heads, kv_heads, head_dim, window)
    out = torch.full(q.shape, UNTOUCHED, dtype=dtype, device=device)
    workspace = poisoned_workspace(len(lengths), *q.shape[1:], device)
    decode(q, out, paged.decodes(order, workspace), layer, cache, splits=max_splits)
    torch.testing.assert_close(out.cpu().double(), expected, atol=TOLERANCE[dtype], rtol=0)
    out.fill_(UNTOUCHED)
    decode_reference(q, out, paged.decodes(order, DecodeGather()), layer, cache)
    torch.testing.assert_close(out.cpu().double(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("held", [FP8, FP12])
@pytest.mark.parametrize("magnitude", [1e-6, 1e-3, 30.0])
def test_weights_fit_whatever_the_values_scale(
    magnitude: float, held: KVFormat, dtype: torch.dtype, device: torch.device
) -> None:
    """Values too small for the smallest scale, ordinary and large ones: as exact relative to their size."""
    torch.manual_seed(0)
    exact = make_paged([150], 1, 64, 16, dtype, device)
    exact.kv[:, 1] *= magnitude
    exact.values[0].mul_(magnitude)
    paged, cache = in_format(exact, held)
    q = fused_queries(1, 4, 64, dtype).to(device)
    out = torch.empty(q.shape, dtype=dtype, device=device)
    order = torch.zeros(1, dtype=torch.int32, device=device)
    batch = paged.decodes(order, poisoned_workspace(1, *q.shape[1:], device))
    decode(q, out, batch, attention_layer(4, 1, 64), cache)
    torch.testing.assert_close(
        out.cpu().double(), decode_exactly(q, paged, 0), atol=TOLERANCE[dtype] * magnitude + 6e-8, rtol=0
    )


@pytest.mark.parametrize(("held", "head_dim"), [(FP8, 80), (FP12, 64), (FP12, 128)])
def test_rows_that_share_a_prefix_attend_to_the_same_as_alone(
    held: KVFormat, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    lengths = [300, 257, 9, 290]
    exact = make_paged(lengths, 1, head_dim, 32, dtype, device)
    share_prefixes(exact, [[1, 0, 3]], [256])
    paged, cache = in_format(exact, held)
    members = members_of([[1, 0, 3]], rows_of_cascade(2), device)
    lens = shared_lens(members, paged.rows, paged.context_lens, paged.block_tables, 32)
    shared = SharedPrefixes(members, cascade_of([[1, 0, 3]], 4, device), lens)
    q = fused_queries(4, 2, head_dim, dtype).to(device)
    out = torch.empty(q.shape, dtype=dtype, device=device)
    order, workspace = torch.randperm(4).int().to(device), poisoned_workspace(4, *q.shape[1:], device)
    decode(q, out, paged.decodes(order, workspace, shared), attention_layer(2, 1, head_dim), cache)
    torch.testing.assert_close(out.cpu().double(), decode_exactly(q, paged, 0), atol=TOLERANCE[dtype], rtol=0)


def test_scales_must_come_with_what_is_rounded_and_fit_it() -> None:
    kv = torch.zeros(3, 2, 4, 16, 64)
    scales = torch.ones(3, 4, 16, 2).half()
    planes = empty_vectors((3, 2, 4, 16, 64), FP12, "cpu")
    fp8 = kv.to(FP8.dtype)
    for cache in (LayerCache(kv, FP32), LayerCache(fp8, FP8, scales), LayerCache(planes, FP12, scales)):
        cache.check()
    with pytest.raises(ValueError, match="fp8_e4m3 comes without scales"):
        LayerCache(fp8, FP8).check()
    with pytest.raises(ValueError, match="fp12_e4m7 comes without scales"):
        LayerCache(planes, FP12).check()
    with pytest.raises(ValueError, match="float32 comes with scales"):
        LayerCache(kv, FP32, scales).check()
    for vectors, held in ((fp8, FP8), (planes, FP12)):
        with pytest.raises(ValueError, match=r"fp16 of shape \(3, 4, 16, 2\)"):
            LayerCache(vectors, held, scales[:2]).check()


def test_a_format_is_not_guessed_from_what_is_in_memory() -> None:
    with pytest.raises(ValueError, match=r"in fp12_e4m7 is of torch\.uint8, not of torch\.float8_e4m3fn"):
        LayerCache(torch.zeros(3, 2, 4, 16, 64).to(FP8.dtype), FP12).check()
    with pytest.raises(ValueError, match="in fp8_e4m3 is of"):
        LayerCache(torch.zeros(3, 2, 4, 16, 64, dtype=torch.uint8), FP8).check()


def test_planes_must_lie_as_the_kernels_read_them() -> None:
    planes = empty_vectors((3, 2, 4, 16, 64), FP12, "cpu")
    scales = torch.ones(3, 4, 16, 2).half()
    for other in (planes.contiguous(), planes[..., :2, :]):
        with pytest.raises(ValueError, match=r"planes must be .* with strides \(32, 512, 1\)"):
            LayerCache(other, FP12, scales).check()
    with pytest.raises(ValueError, match="head dims of 32, 64, 128 or 256, the model has 80"):
        FP12.elements(80)


@pytest.mark.parametrize("held", [FP8, FP12])
def test_reading_dequantises(held: KVFormat) -> None:
    x = torch.randn(3, 2, 4, 16, 64, generator=torch.Generator().manual_seed(0))
    vectors, scales = held.quantize(x)
    index = (torch.tensor([2, 0])[:, None], torch.tensor(1), torch.arange(4))
    read = LayerCache(vectors, held, scales.permute(0, 2, 3, 1)).read(index)
    assert torch.equal(read, dequantized(x, held)[index])
    assert torch.equal(LayerCache(x, FP32).read(index), x[index])
