"""Tokens drawn from parts of the vocabulary, a rank each, are those that are drawn from all of it."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.sampling.parts import (
    best_of_all,
    best_of_all_reference,
    best_of_part,
    best_of_part_reference,
)
from quire.kernels.sampling.sample import sample, sample_reference
from quire.kernels.sampling.state import SamplingState

WAYS = {
    "torch": (sample_reference, best_of_part_reference, best_of_all_reference),
    "kernels": (sample, best_of_part, best_of_all),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("vocabulary", "width"), [(199, 112), (199, 64), (2100, 1056), (40, 64)])
def test_parts_give_the_token_of_all(way: str, vocabulary: int, width: int, device: str) -> None:
    """With ties, rows that cannot be sampled, and a last part that is short or has no token at all."""
    whole, part, every = WAYS[way]
    generator = torch.Generator().manual_seed(vocabulary + width)
    logits = 3 * torch.randn(7, vocabulary, generator=generator)
    logits[1, [3, vocabulary - 1]] = 20.0
    logits[2, vocabulary // 2] = torch.nan
    logits[3, vocabulary - 1] = torch.inf
    logits[4] = -torch.inf
    state = SamplingState.allocate(8, device)
    state.temperature[:] = torch.tensor([0, 0, 1, 0, 0, 0.7, 1.6, 0])
    state.seed[:] = torch.arange(8) * 0x1234567
    state.index[:] = torch.arange(8, dtype=torch.int32) % 3
    rows = torch.arange(7, dtype=torch.int32, device=device)
    positions = torch.arange(40, 47, dtype=torch.int32, device=device)
    last_tokens, last_of_parts = (torch.zeros(8, dtype=torch.int32, device=device) for _ in range(2))
    expected = whole(logits.to(device), rows, positions, state, last_tokens)
    ranks = -(-vocabulary // width) + 1
    padded = torch.zeros(7, ranks * width)
    padded[:, :vocabulary] = logits
    parts = []
    for rank in range(ranks):
        own = padded[:, rank * width : (rank + 1) * width].contiguous().to(device)
        before = own.clone()
        count = min(max(vocabulary - rank * width, 0), width)
        parts.append(part(own, rows, positions, state, rank * width, count))
        assert torch.equal(own.nan_to_num(), before.nan_to_num())
    got = every(torch.stack(parts), rows, last_of_parts)
    assert got.tolist() == expected.tolist()
    assert got.tolist()[1:5] == [3, -1, -1, -1]
    assert torch.equal(last_of_parts, last_tokens)
