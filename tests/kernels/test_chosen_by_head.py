"""Attention to tokens that each KV head chooses for itself: against fp64 over those alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from paged import TOLERANCE, attend_exactly, forget, make_paged, poisoned_workspace

from quire.kernels.attention import chosen_by_head
from quire.kernels.attention.attend import Attend, attend_mixed, attend_reference
from quire.kernels.attention.batch import AttentionLayer, DecodeBatch, ForwardBatch, PrefillBatch
from quire.kernels.attention.chosen_by_head import ChosenByHead, attend_to_chosen_by_head
from quire.kernels.attention.decode import DecodeKernel
from quire.kernels.attention.prefill import PrefillKernel
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.formats.layer_cache import LayerCache

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, MOST = 4, 2, 16, 16, 18
BY: dict[str, Attend] = {
    "kernels": partial(attend_mixed, decode_by=DecodeKernel.SPLIT, prefill_by=PrefillKernel.TRITON),
    "torch": attend_reference,
}


@pytest.mark.parametrize("by", BY)
def test_each_head_attends_to_what_it_chose(
    by: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two decodes, one of which pads, and a chunk of four tokens, two at a time; some see few enough."""
    paged = make_paged([33, 0, 20], KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype, device)
    cache = LayerCache(paged.kv, UNSCALED[dtype])
    layer = AttentionLayer(HEADS, KV_HEADS, HEAD_DIM, 0.21)
    places = [(0, 32), (1, -1), *((2, position) for position in range(16, 20))]

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    qkv = torch.randn(len(places), (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype)
    positions = torch.full((len(places), KV_HEADS, MOST), 10_000)  # what is not counted may be anything
    counts = torch.zeros(len(places), KV_HEADS, dtype=torch.int64)
    slots = []
    for token, (row, position) in enumerate(places):
        slots.append(-1)
        if position < 0:
            continue
        own = [paged.keys[row][position], paged.values[row][position]]
        qkv[token, HEADS * HEAD_DIM :] = torch.cat(own).flatten()  # what the cache is to hold
        slots[-1] = forget(paged, row, position)
        if position >= MOST:  # else all are attended to, whatever is said
            for head in range(KV_HEADS):
                count = MOST - 5 * head
                positions[token, head, :count] = torch.randperm(position + 1)[:count]
                counts[token, head] = count
    qkv = qkv.to(device)
    batch = ForwardBatch(
        tokens=int32([0] * len(places)),
        positions=int32([position for _, position in places]),
        slots=torch.tensor(slots, device=device),
        decode=DecodeBatch(
            paged.block_tables, paged.rows[:2], paged.context_lens[:2], int32([0, 1]),
            poisoned_workspace(4, HEADS, HEAD_DIM, device),
        ),
        prefill=PrefillBatch(paged.block_tables, paged.rows[2:], int32([2, 6]), paged.context_lens[2:], 4),
    )  # fmt: skip
    rows = paged.rows[[row for row, _ in places]]
    monkeypatch.setattr(chosen_by_head, "MOST_BYTES", 2 * 2 * KV_HEADS * 32 * HEAD_DIM * dtype.itemsize)
    picked = ChosenByHead(positions.to(device), counts.to(device), MOST)
    out = attend_to_chosen_by_head(
        qkv, batch, rows, layer, cache, picked, lambda step: BY[by], lambda step: BY[by]
    )
    for token, (row, position) in enumerate(places):
        for head in range(KV_HEADS if position >= 0 else 0):
            group = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
            q = qkv[token, : HEADS * HEAD_DIM].view(1, HEADS, HEAD_DIM)[:, group]
            seen = (
                positions[token, head, : counts[token, head]]
                if position >= MOST
                else torch.arange(position + 1)
            )
            keys, values = (each[row][seen][:, head : head + 1] for each in (paged.keys, paged.values))
            expected = attend_exactly(q.cpu(), keys, values, layer.scale, 0)
            got = out[token].cpu().view(1, HEADS, -1)[:, group]
            torch.testing.assert_close(got, expected.to(dtype), atol=TOLERANCE[dtype], rtol=0)


def test_heads_with_sinks_are_refused(device: torch.device) -> None:
    """Each row would be given those of the first heads."""
    paged = make_paged([33], KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.float32, device)
    layer = AttentionLayer(HEADS, KV_HEADS, HEAD_DIM, 0.21, sinks=torch.zeros(HEADS, device=device))
    none = torch.empty(0, device=device)
    with pytest.raises(ValueError, match="without sinks and slopes"):
        attend_to_chosen_by_head(
            none, None, none, layer, LayerCache(paged.kv, UNSCALED[torch.float32]),  # type: ignore[arg-type]
            ChosenByHead(none, none, MOST), lambda step: attend_reference, lambda step: attend_reference,
        )  # fmt: skip
