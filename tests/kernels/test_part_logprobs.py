"""Log-probabilities from parts of the vocabulary, a rank each, are those from all of it."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.sampling.logprobs import logprobs, logprobs_reference
from quire.kernels.sampling.part_logprobs import (
    chosen_of_part,
    logprobs_of_all,
    logprobs_of_all_reference,
    logprobs_of_part,
    logprobs_of_part_reference,
)

WAYS = {
    "torch": (logprobs_reference, logprobs_of_part_reference, logprobs_of_all_reference),
    "kernels": (logprobs, logprobs_of_part, logprobs_of_all),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("vocabulary", "width", "k"), [(199, 104, 5), (40, 16, 20), (9000, 4504, 3), (8, 8, 0)]
)
def test_parts_give_the_log_probabilities_of_all(
    way: str, vocabulary: int, width: int, k: int, device: torch.device
) -> None:
    """With tokens that cannot be, token -1, a row with NaN, and a last part that has no token at all."""
    whole, part, every = WAYS[way]
    generator = torch.Generator().manual_seed(vocabulary + k)
    logits = 3 * torch.randn(5, vocabulary, generator=generator).to(device)
    logits[1, : vocabulary // 2] = -torch.inf
    logits[2, vocabulary // 2] = torch.nan
    tokens = torch.tensor([vocabulary - 1, vocabulary - 2, 0, -1, vocabulary // 3], dtype=torch.int32).to(
        device
    )
    ranks = -(-vocabulary // width) + 1
    padded = torch.full((5, ranks * width), 9.0, device=device)
    padded[:, :vocabulary] = logits
    parts = [padded[:, rank * width : (rank + 1) * width].contiguous() for rank in range(ranks)]
    counts = [min(max(vocabulary - rank * width, 0), width) for rank in range(ranks)]
    chosen = torch.stack(
        [chosen_of_part(parts[rank], tokens, rank * width, counts[rank]) for rank in range(ranks)]
    ).amax(0)
    gathered = [part(parts[rank], chosen, k, rank * width, counts[rank]) for rank in range(ranks)]

    found = every(torch.stack(gathered), chosen, k)
    expected = whole(logits, tokens, k)
    for name, ours, theirs in zip(("chosen", "rank", "tokens", "best"), found, expected, strict=True):
        if name in ("chosen", "best"):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True, msg=name)
        else:  # of a row with NaN no order is defined
            assert torch.equal(ours[[0, 1, 3, 4]], theirs[[0, 1, 3, 4]]), name
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
