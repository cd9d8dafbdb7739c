"""An fp12 cache as numbers, and prefill attention to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged import TOLERANCE, attend_exactly, attention_layer, fused_queries, make_paged, share_prefixes
from quantized import FP12, empty_vectors, in_format

from quire.kernels.attention.batch import PrefillBatch
from quire.kernels.attention.dequantize import dequantize
from quire.kernels.attention.prefill import prefill
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import gpu_of

UNTOUCHED = 7.0


@pytest.mark.parametrize(("kv_heads", "head_dim", "block_size"), [(2, 64, 16), (1, 128, 32), (1, 32, 128)])
def test_earlier_blocks_are_what_a_read_gives_and_others_are_left_alone(
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "quire.kernels.attention.dequantize.PROGRAMS", 4 * kv_heads
    )  # two for each head's keys, or its values
    torch.manual_seed(0)
    lengths = [block_size + 3, 0, 1, 0, block_size, 6 * block_size - 3, 2 * block_size + 1, 0, 0]
    exact = make_paged(lengths, kv_heads, head_dim, block_size, dtype, device)
    share_prefixes(exact, [[5, 6]], [2 * block_size])
    paged, cache = in_format(exact, FP12)
    shape = (*paged.kv.shape[:4], head_dim)
    into = torch.full(shape, UNTOUCHED, dtype=dtype, device=device)
    own = [2, 0, 1, 0, 1, 5, block_size + 1, 3 * block_size, 0]  # padding's queries have no context
    starts = torch.tensor([7, *own]).cumsum(0).int().to(device)
    dequantize(paged.prefills(starts, max(own)), replace(cache, dequantized=into))
    theirs = torch.zeros(shape[0], dtype=torch.bool)
    for row, length, newest in zip(paged.rows.tolist(), lengths, own, strict=True):
        earlier = max(length - newest, 0)
        theirs[paged.block_tables[row, : -(-earlier // block_size)].long().cpu()] = True
    blocks = torch.arange(shape[0], device=device)[:, None, None]
    parts, heads = torch.arange(2, device=device)[:, None], torch.arange(kv_heads, device=device)
    held = cache.read((blocks, parts, heads)).to(dtype).cpu()
    torch.testing.assert_close(into.cpu()[theirs], held[theirs], rtol=0, atol=0, equal_nan=True)
    assert (into.cpu()[~theirs] == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"),
    [(4, 2, 64, 0), (4, 1, 128, 0), (4, 1, 64, 40), (7, 1, 128, 0), (6, 2, 64, 0)],
)
def test_prefill_by_what_is_expanded_is_prefill(
    heads: int, kv_heads: int, head_dim: int, window: int, dtype: torch.dtype, device: torch.device
) -> None:
    """By Hopper's kernel; where that does not take the heads, the cache is read as it is."""
    torch.manual_seed(0)
    query_lens, context_lens = [1, 0, 33, 70, 0], [1, 5, 150, 70, 0]
    paged, cache = in_format(make_paged(context_lens, kv_heads, head_dim, 16, dtype, device), FP12)
    dequantized = torch.full((*paged.kv.shape[:4], head_dim), torch.nan, dtype=dtype, device=device)
    for i, (queries, length) in enumerate(zip(query_lens, context_lens, strict=True)):  # as they were written
        slots = torch.arange(length - queries, length)
        blocks = paged.block_tables[paged.rows[i]].long().cpu()[slots // 16]
        newest = torch.stack((paged.keys[i], paged.values[i]), 1)[length - queries :]
        dequantized[blocks, :, :, slots % 16] = newest.to(device, dtype)
    q = fused_queries(sum(query_lens), heads, head_dim, dtype).to(device)
    out = torch.empty(q.shape, dtype=dtype, device=device)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(device)
    layer = attention_layer(heads, kv_heads, head_dim, window)
    prefill(q, out, paged.prefills(starts, max(query_lens)), layer, replace(cache, dequantized=dequantized))
    exact = [
        attend_exactly(x, k, v, head_dim**-0.5, window)
        for x, k, v in zip(q.split(query_lens), paged.keys, paged.values, strict=True)
    ]
    torch.testing.assert_close(out.cpu().double(), torch.cat(exact), atol=TOLERANCE[dtype], rtol=0)
    hopper = gpu_of(device).has_warpgroup_products
    earlier = dequantized[paged.block_tables[paged.rows[2], 0].long()]
    assert earlier.isfinite().all() == (hopper and dtype != torch.float32 and not window)


def test_room_that_does_not_suit_is_refused() -> None:
    planes = empty_vectors((3, 2, 1, 16, 64), FP12, "cpu")
    integers, scales = torch.zeros(1, dtype=torch.int32), torch.ones(3, 1, 16, 2).half()
    batch = PrefillBatch(integers[None], integers, integers, integers, 1)
    for into in (torch.zeros(2, 2, 1, 16, 64), torch.zeros(3, 2, 1, 16, 32), torch.zeros(3, 2, 1, 64, 16).mT):
        with pytest.raises(ValueError, match=r"does not dequantize into .* of shape \(3, 2, 1, 16, 64\)"):
            dequantize(batch, LayerCache(planes, FP12, scales, into))
