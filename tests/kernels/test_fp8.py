"""The fp8 cache: its rounding, its writes bit by bit, and attention over it against fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from paged import TOLERANCE, Paged, attend_exactly, fused_queries, make_paged, share_prefixes
from test_shared_prefix import bundle_of, members_of

from kernels.decode_attention import decode_attention
from kernels.decode_reference import decode_attention_reference
from kernels.decode_splits import DecodeWorkspace
from kernels.fp8 import DTYPE, check_kv_scales, quantize, read_cache, scale_of, to_e4m3
from kernels.prefill_attention import prefill_attention, prefill_attention_reference
from kernels.qkv_cache import qkv_to_cache, qkv_to_cache_reference
from kernels.shared_prefix import SharedPrefixes, rows_of_bundle, shared_lens

E4M3 = torch.arange(256, dtype=torch.uint8).view(DTYPE)
FINITE = E4M3[~E4M3.float().isnan()].float().unique()


def in_fp8(paged: Paged) -> tuple[Paged, torch.Tensor]:
    """The same in an fp8 cache and its scales, strided as in a cache of two layers; NaN stays NaN."""
    values, scales = quantize(paged.kv)
    kv = torch.stack((values.view(torch.uint8),) * 2, dim=1).view(DTYPE)[:, 1]
    kv_scales = torch.stack((scales.permute(0, 2, 3, 1),) * 2, dim=1)[:, 1]
    keys, values = ([dequantized(part) for part in held] for held in (paged.keys, paged.values))
    return Paged(kv, paged.block_tables, paged.rows, paged.context_lens, keys, values), kv_scales


def dequantized(x: torch.Tensor) -> torch.Tensor:
    values, scales = quantize(x)
    return values.float() * scales.float().unsqueeze(-1)


@pytest.mark.parametrize("magnitude", [1e-12, 1e-3, 1.0, 1e4])
def test_every_value_becomes_the_nearest_of_the_scaled_grid(magnitude: float) -> None:
    x = magnitude * torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    values, scales = quantize(x)
    wide = scales.double().unsqueeze(-1)
    error = (values.double() * wide - x.double()).abs()
    nearest = (FINITE.double() * wide.unsqueeze(-1) - x.double().unsqueeze(-1)).abs().amin(-1)
    assert ((error - nearest) <= 1e-6 * x.abs().amax(-1, keepdim=True)).all()
    if magnitude >= 1:  # 1e-3 has the smallest scale already
        assert (values.float().abs().amax(-1) == 448).all()
        assert (error <= x.abs() / 16 + wide * 2.0**-10).all()


@triton.jit
def quantize_kernel(
    x: tl.tensor, values: tl.tensor, scales: tl.tensor, D: tl.constexpr, ROWS: tl.constexpr
) -> None:
    row = tl.arange(0, ROWS)[:, None]
    vector = tl.load(x + row * D + tl.arange(0, D)[None, :])
    scale, inverse = scale_of(tl.max(tl.abs(vector), axis=1, keep_dims=True))
    tl.store(values + row * D + tl.arange(0, D)[None, :], to_e4m3(vector * inverse))
    tl.store(scales + row, scale)


def test_the_kernels_round_as_torch_does(device: torch.device) -> None:
    """All of e4m3, what lies halfway between its values and beside that, zeros, tiny and huge vectors."""
    halfway = (FINITE[1:] + FINITE[:-1]) / 2
    grid = torch.cat((FINITE, halfway, halfway.nextafter(FINITE[1:]), halfway.nextafter(FINITE[:-1])))
    x = torch.zeros(256, 64)
    x.view(-1)[: len(grid)] = grid
    x[:128, 63] = 448.0  # their scale is 1
    generator = torch.Generator().manual_seed(0)
    x[128:192] = torch.randn(64, 64, generator=generator) * torch.logspace(-12, 7, 64)[:, None]
    x[192:200] = 1e9
    values, scales = torch.empty(256, 64, dtype=DTYPE, device=device), torch.empty(256, device=device).half()
    quantize_kernel[(1,)](x.to(device), values, scales, 64, 256)
    expected_values, expected_scales = quantize(x)
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(values.cpu().float(), expected_values.float())


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"), [(16, 8, 64), (14, 2, 80), (3, 3, 96), (4, 1, 128)]
)
@pytest.mark.parametrize("rotates", [True, False])
def test_the_write_is_what_the_full_precision_write_quantised_gives(
    q_heads: int, kv_heads: int, head_dim: int, rotates: bool, device: torch.device, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    block_size, tokens = 16, 4
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * head_dim, generator=generator).to(device, dtype)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    slots = torch.tensor([0, 4 * block_size + 15, 35, -1], device=device)
    rope = torch.rand(tokens, head_dim, generator=generator).to(device) if rotates else None
    shape = (5, 2, 2, kv_heads, block_size, head_dim)
    exact = torch.zeros(shape, dtype=dtype, device=device)[:, 1]
    qkv_to_cache(qkv.clone(), positions, slots, exact, q_heads, rope, None, None, 1e-6)
    values, scales = quantize(exact)
    unwritten = torch.full((5, block_size), True)
    unwritten[(slots[:3] // block_size).cpu(), (slots[:3] % block_size).cpu()] = False
    for write in (qkv_to_cache, qkv_to_cache_reference):
        cache = torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(DTYPE)
        cache_scales = torch.full((5, 2, kv_heads, block_size, 2), torch.nan, device=device).half()
        write(qkv.clone(), positions, slots, cache[:, 1], q_heads, rope, None, None, 1e-6, cache_scales[:, 1])
        written, written_scales = cache[:, 1].view(torch.uint8).cpu(), cache_scales[:, 1].cpu()
        for block, offset in [(0, 0), (4, 15), (2, 3)]:
            at = (block, slice(None), slice(None), offset)
            assert torch.equal(written[at].view(DTYPE).float(), values.cpu().float()[at])
            assert torch.equal(written_scales[block, :, offset].mT, scales.cpu()[at])
        assert (written.permute(0, 3, 1, 2, 4)[unwritten] == 0x7F).all()
        assert written_scales.permute(0, 2, 1, 3)[unwritten].isnan().all()
        assert (cache[:, 0].view(torch.uint8) == 0x7F).all() and cache_scales[:, 0].isnan().all()


SEQUENCES = [(1, 1), (0, 5), (5, 70), (33, 150), (1, 64), (0, 0), (16, 31)]


@pytest.mark.parametrize("attention", [prefill_attention, prefill_attention_reference])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window"),
    [(4, 2, 80, 32, 0), (4, 1, 128, 16, 0), (7, 1, 96, 128, 20)],
)
def test_prefill_over_an_fp8_cache(
    attention: Callable[..., None],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    query_lens, context_lens = (list(lengths) for lengths in zip(*SEQUENCES, strict=True))
    paged, kv_scales = in_fp8(make_paged(context_lens, kv_heads, head_dim, block_size, dtype, device))
    q = fused_queries(sum(query_lens), heads, head_dim, dtype).to(device)
    out = torch.empty(q.shape, dtype=dtype, device=device)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(device)
    attention(
        q, out, paged.kv, paged.block_tables, paged.rows, starts, paged.context_lens, max(query_lens),
        head_dim**-0.5, window, kv_scales,
    )  # fmt: skip
    exact = [
        attend_exactly(x, k, v, head_dim**-0.5, window)
        for x, k, v in zip(q.split(query_lens), paged.keys, paged.values, strict=True)
    ]
    torch.testing.assert_close(out.cpu().double(), torch.cat(exact), atol=TOLERANCE[dtype], rtol=0)


UNTOUCHED = 7.0  # what `out` holds where nothing is to be written


def decode_exactly(q: torch.Tensor, paged: Paged, window: int) -> torch.Tensor:
    parts = [
        attend_exactly(x, k, v, q.shape[-1] ** -0.5, window) if len(k) else torch.full(x.shape, UNTOUCHED)
        for x, k, v in zip(q.cpu().split(1), paged.keys, paged.values, strict=True)
    ]
    return torch.cat([part.double() for part in parts])


def workspace_of(batch: int, q: torch.Tensor) -> DecodeWorkspace:
    workspace = DecodeWorkspace.allocate(batch, *q.shape[1:], q.device)
    for scratch in (workspace.partials, workspace.lse, workspace.prefix.partials, workspace.prefix.lse):
        scratch.fill_(torch.nan)
    return workspace


@pytest.mark.parametrize("max_splits", [1, 2])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window"),
    [(4, 2, 80, 32, 0), (4, 1, 128, 16, 0), (7, 1, 96, 128, 20)],
)
def test_decode_over_an_fp8_cache(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int,
    max_splits: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    lengths = [0, 1, 64, 127, 128, 129, 200]
    paged, kv_scales = in_fp8(make_paged(lengths, kv_heads, head_dim, block_size, dtype, device))
    q = fused_queries(len(lengths), heads, head_dim, dtype).to(device)
    order = torch.randperm(len(lengths)).int().to(device)
    expected = decode_exactly(q, paged, window)
    common = (paged.kv, paged.block_tables, paged.rows, paged.context_lens, order, head_dim**-0.5, window)
    out = torch.full(q.shape, UNTOUCHED, dtype=dtype, device=device)
    workspace = workspace_of(len(lengths), q)
    decode_attention(q, out, *common, workspace, max_splits, kv_scales=kv_scales)
    torch.testing.assert_close(out.cpu().double(), expected, atol=TOLERANCE[dtype], rtol=0)
    out.fill_(UNTOUCHED)
    decode_attention_reference(q, out, *common, kv_scales=kv_scales)
    torch.testing.assert_close(out.cpu().double(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("magnitude", [1e-6, 1e-3, 30.0])
def test_weights_fit_fp16_whatever_the_values_scale(magnitude: float, device: torch.device) -> None:
    """Values too small for the smallest scale, ordinary and large ones: as exact relative to their size."""
    torch.manual_seed(0)
    exact = make_paged([150], 1, 64, 16, torch.float16, device)
    exact.kv[:, 1] *= magnitude
    exact.values[0].mul_(magnitude)
    paged, kv_scales = in_fp8(exact)
    q = fused_queries(1, 4, 64, torch.float16).to(device)
    out = torch.empty(q.shape, dtype=torch.float16, device=device)
    order = torch.zeros(1, dtype=torch.int32, device=device)
    decode_attention(
        q, out, paged.kv, paged.block_tables, paged.rows, paged.context_lens, order, 0.125, 0,
        workspace_of(1, q), kv_scales=kv_scales,
    )  # fmt: skip
    torch.testing.assert_close(
        out.cpu().double(), decode_exactly(q, paged, 0), atol=2e-3 * magnitude + 6e-8, rtol=0
    )


def test_rows_that_share_a_prefix_in_fp8_attend_to_the_same_as_alone(
    dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    lengths = [300, 257, 9, 290]
    exact = make_paged(lengths, 1, 80, 32, dtype, device)
    share_prefixes(exact, [[1, 0, 3]], [256])
    paged, kv_scales = in_fp8(exact)
    members = members_of([[1, 0, 3]], rows_of_bundle(2), device)
    lens = shared_lens(members, paged.rows, paged.context_lens, paged.block_tables, 32)
    shared = SharedPrefixes(members, bundle_of([[1, 0, 3]], 4, device), lens)
    q = fused_queries(4, 2, 80, dtype).to(device)
    out = torch.empty(q.shape, dtype=dtype, device=device)
    decode_attention(
        q, out, paged.kv, paged.block_tables, paged.rows, paged.context_lens,
        torch.randperm(4).int().to(device), 80**-0.5, 0, workspace_of(4, q), shared=shared,
        kv_scales=kv_scales,
    )  # fmt: skip
    torch.testing.assert_close(out.cpu().double(), decode_exactly(q, paged, 0), atol=TOLERANCE[dtype], rtol=0)


def test_scales_must_come_with_fp8_and_fit_it() -> None:
    kv = torch.zeros(3, 2, 4, 16, 64)
    scales = torch.ones(3, 4, 16, 2).half()
    check_kv_scales(kv, None)
    check_kv_scales(kv.to(DTYPE), scales)
    with pytest.raises(ValueError, match="float8_e4m3fn comes without scales"):
        check_kv_scales(kv.to(DTYPE), None)
    with pytest.raises(ValueError, match="float32 comes with scales"):
        check_kv_scales(kv, scales)
    with pytest.raises(ValueError, match=r"fp16 of shape \(3, 4, 16, 2\)"):
        check_kv_scales(kv.to(DTYPE), scales[:2])


def test_reading_dequantises() -> None:
    x = torch.randn(3, 2, 4, 16, 64, generator=torch.Generator().manual_seed(0))
    values, scales = quantize(x)
    index = (torch.tensor([2, 0])[:, None], torch.tensor(1), torch.arange(4))
    read = read_cache(values, scales.permute(0, 2, 3, 1), index)
    assert torch.equal(read, dequantized(x)[index])
    assert torch.equal(read_cache(x, None, index), x[index])
