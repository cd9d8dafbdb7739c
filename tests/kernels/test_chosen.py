"""Attention to chosen tokens, latents or keys and values of heads: against fp64 over those alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from paged import NO_BLOCK, TOLERANCE, attend_exactly, forget, make_paged, poisoned_workspace

from quire.kernels.attention import chosen
from quire.kernels.attention.attend import Attend, attend_mixed, attend_reference
from quire.kernels.attention.batch import AttentionLayer, DecodeBatch, ForwardBatch, PrefillBatch
from quire.kernels.attention.decode import DecodeKernel
from quire.kernels.attention.latent.attend import attend_to_latents
from quire.kernels.attention.latent.chosen import attend_to_chosen_latents, choice_splits
from quire.kernels.attention.latent.write import write_latents, write_latents_reference
from quire.kernels.attention.prefill import PrefillKernel
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.formats.layer_cache import LayerCache

HEADS, BLOCK_SIZE, MOST = 4, 16, 20
KERNELS: dict[int, Attend] = {  # by numbers of a value that are its key's
    0: partial(attend_mixed, decode_by=DecodeKernel.SPLIT, prefill_by=PrefillKernel.TRITON),
    32: attend_to_latents,
}


@pytest.mark.parametrize(
    ("latent", "by"),
    [(0, "kernels"), (0, "torch"), (32, "kernels"), (32, "torch"), (32, "tables of tokens")],
)
def test_only_what_is_chosen_is_attended_to(
    latent: int, by: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two decodes, one of which pads, and a chunk of five tokens, two at a time."""
    kv_heads, head_dim = (1, 40) if latent else (2, 16)
    paged = make_paged([33, 0, 20], kv_heads, head_dim, BLOCK_SIZE, dtype, device)
    if latent:
        paged.kv, paged.values = paged.kv[:, :1], [keys[..., :latent] for keys in paged.keys]
    cache = LayerCache(paged.kv, UNSCALED[dtype], latent=latent)
    layer = AttentionLayer(HEADS, kv_heads, head_dim, 0.21, latent=latent)
    places = [(0, 32), (1, -1), *((2, position) for position in range(15, 20))]

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    qkv = torch.randn(len(places), (HEADS + (1 if latent else 2 * kv_heads)) * head_dim).to(dtype)
    positions = torch.full((len(places), 2 * BLOCK_SIZE), NO_BLOCK, dtype=torch.int32)
    slots = []
    for token, (row, position) in enumerate(places):
        slots.append(-1)
        if position < 0:
            continue
        own = [paged.keys[row][position]] + [paged.values[row][position]] * (not latent)
        qkv[token, HEADS * head_dim :] = torch.cat(own).flatten()  # what the cache is to hold
        slots[-1] = forget(paged, row, position)
        if position >= MOST:  # else all are attended to, whatever is said
            positions[token, :MOST] = torch.randperm(position + 1)[:MOST].int()
    qkv = qkv.to(device)
    batch = ForwardBatch(
        tokens=int32([0] * len(places)),
        positions=int32([position for _, position in places]),
        slots=torch.tensor(slots, device=device),
        decode=DecodeBatch(
            paged.block_tables, paged.rows[:2], paged.context_lens[:2], int32([0, 1]),
            poisoned_workspace(4, HEADS, latent or head_dim, device),
        ),
        prefill=PrefillBatch(paged.block_tables, paged.rows[2:], int32([2, 7]), paged.context_lens[2:], 5),
    )  # fmt: skip
    rows = paged.rows[[row for row, _ in places]]
    size = 2 * BLOCK_SIZE * (1 if latent else 2) * kv_heads * head_dim * dtype.itemsize
    monkeypatch.setattr(chosen, "MOST_BYTES", 2 * size)
    picked = chosen.Chosen(positions.to(device), MOST)
    if by == "tables of tokens":
        out = attend_to_chosen_latents(qkv, batch, rows, layer, cache, picked)
    else:
        attend = KERNELS[latent] if by == "kernels" else attend_reference
        out = chosen.attend_to_chosen(qkv, batch, rows, layer, cache, picked, lambda step: attend)
    for token, (row, position) in enumerate(places):
        if position >= 0:
            q = qkv[token, : HEADS * head_dim].view(1, HEADS, head_dim)
            seen = positions[token, :MOST].long() if position >= MOST else torch.arange(position + 1)
            expected = attend_exactly(q.cpu(), paged.keys[row][seen], paged.values[row][seen], layer.scale, 0)
            got = out[token].cpu().view(1, HEADS, -1)
            torch.testing.assert_close(got, expected.to(dtype), atol=TOLERANCE[dtype], rtol=0)


def test_choices_fill_a_gpu_once_and_are_merged_from_few_parts() -> None:
    found = {tokens: choice_splits(tokens, 128, 2048, 132) for tokens in (1, 2, 8, 16, 32, 40, 64, 2048)}
    assert found == {1: None, 2: 16, 8: 8, 16: 4, 32: 2, 40: 3, 64: 1, 2048: 1}


def test_latents_are_written_where_they_belong(dtype: torch.dtype, device: torch.device) -> None:
    latents = torch.randn(3, 24).to(device, dtype)
    slots = torch.tensor([17, -1, 5], device=device)
    caches = [
        LayerCache(
            torch.zeros(2, 1, 1, BLOCK_SIZE, 24, dtype=dtype, device=device), UNSCALED[dtype], latent=24
        )
        for _ in range(2)
    ]
    for write, cache in zip((write_latents, write_latents_reference), caches, strict=True):
        write(latents, slots, cache)
        assert torch.equal(cache.kv[1, 0, 0, 1], latents[0]) and torch.equal(cache.kv[0, 0, 0, 5], latents[2])
    assert torch.equal(caches[0].kv, caches[1].kv) and int(caches[0].kv.any(-1).sum()) == 2
