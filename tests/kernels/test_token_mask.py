"""Masked logits, against a look at each bit."""

import pytest
import torch

from quire.kernels.sampling.masks import mask_tokens, mask_tokens_reference


@pytest.mark.parametrize("function", [mask_tokens, mask_tokens_reference])
@pytest.mark.parametrize("vocabulary", [1, 31, 32, 97, 2500])
@pytest.mark.parametrize("rows", [[], [2], [4, 0, 3]])
@pytest.mark.parametrize("first", [0, 48])
def test_only_forbidden_tokens_of_masked_rows_change(function, vocabulary, rows, first, dtype, device):
    torch.manual_seed(vocabulary)
    logits = torch.randn(5, vocabulary + 3, dtype=dtype)[:, :vocabulary]  # its rows need not be dense
    words = -(-(first + vocabulary) // 32)
    masks = torch.randint(-(2**31), 2**31, (len(rows), words), dtype=torch.int64).int()
    expected = logits.clone()
    for row, mask in zip(rows, masks.tolist(), strict=True):
        for column, token in enumerate(range(first, first + vocabulary)):
            if not mask[token // 32] >> token % 32 & 1:
                expected[row, column] = -torch.inf
    on_device = logits.to(device)
    function(on_device, torch.tensor(rows, dtype=torch.int64, device=device), masks.to(device), first)
    assert torch.equal(on_device.cpu(), expected)
