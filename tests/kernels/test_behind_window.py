"""Blocks before the tile of keys in which a window begins may be another sequence's: they are not read."""

from collections.abc import Callable

import pytest
import torch
from paged import (
    HAS_GPU,
    TOLERANCE,
    Paged,
    attend_exactly,
    attention_layer,
    decode_exactly,
    fused_queries,
    make_paged,
    poisoned_workspace,
)

from quire.kernels.attention.decode import decode
from quire.kernels.attention.decode_reference import decode_reference
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.attention.kv_tile import LARGEST_KEY_TILE
from quire.kernels.attention.prefill import prefill, prefill_reference

CONTEXTS = [300, 65, 7, 190]
QUERIES = [20, 3, 7, 70]
WINDOW, BLOCK_SIZE = 40, 16
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32


def give_back(paged: Paged, first_positions: list[int]) -> int:
    """Have tables name a block of NaN where no query from these positions on reads; return how often."""
    used = {block for row in paged.rows.tolist() for block in paged.block_tables[row].tolist()}
    nan = next(block for block in range(len(paged.kv)) if block not in used)
    given_back = 0
    for row, position in zip(paged.rows.tolist(), first_positions, strict=True):
        first_key = max(0, position + 1 - WINDOW) // LARGEST_KEY_TILE * LARGEST_KEY_TILE
        paged.block_tables[row, : first_key // BLOCK_SIZE] = nan
        given_back += first_key // BLOCK_SIZE
    return given_back


@pytest.mark.parametrize("attention", [decode, decode_reference])
def test_by_decodes(attention: Callable[..., None], device: torch.device) -> None:
    paged = make_paged(CONTEXTS, 2, 64, BLOCK_SIZE, DTYPE, device)
    q = fused_queries(len(CONTEXTS), 4, 64, DTYPE).to(device)
    expected = decode_exactly(q, paged, WINDOW)
    assert give_back(paged, [context - 1 for context in CONTEXTS]) == 24
    order = torch.arange(len(CONTEXTS), dtype=torch.int32, device=device)
    workspace = DecodeGather()
    if attention is decode:
        workspace = poisoned_workspace(len(CONTEXTS), 4, 64, device)
    out = torch.full((len(CONTEXTS), 4, 64), 7.0, dtype=DTYPE, device=device)
    attention(q, out, paged.decodes(order, workspace), attention_layer(4, 2, 64, WINDOW), paged.cache())
    assert (out.cpu().double() - expected).abs().max() < TOLERANCE[DTYPE]


@pytest.mark.parametrize("attention", [prefill, prefill_reference])
def test_by_prefills(attention: Callable[..., None], device: torch.device) -> None:
    paged = make_paged(CONTEXTS, 2, 64, BLOCK_SIZE, DTYPE, device)
    q = fused_queries(sum(QUERIES), 4, 64, DTYPE).to(device)
    expected = torch.cat(
        [
            attend_exactly(own, keys, values, 64**-0.5, WINDOW)
            for own, keys, values in zip(q.split(QUERIES), paged.keys, paged.values, strict=True)
        ]
    )
    firsts = [context - count for context, count in zip(CONTEXTS, QUERIES, strict=True)]
    assert give_back(paged, firsts) == 16
    starts = torch.tensor([0, *QUERIES], device=device).cumsum(0).int()
    out = torch.full((sum(QUERIES), 4, 64), 7.0, dtype=DTYPE, device=device)
    attention(q, out, paged.prefills(starts, max(QUERIES)), attention_layer(4, 2, 64, WINDOW), paged.cache())
    assert (out.cpu().double() - expected).abs().max() < TOLERANCE[DTYPE]
