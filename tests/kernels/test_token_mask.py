"""Masked logits, against a look at each bit."""

import pytest
import torch

from quire.kernels.sampling.masks import mask_tokens, mask_tokens_reference


@pytest.mark.parametrize("function", [mask_tokens, mask_tokens_reference])
@pytest.mark.parametrize("vocabulary", [1, 31, 32, 97, 2500])
@pytest.mark.parametrize("rows", [[], [2], [4, 0, 3]])
def test_only_forbidden_tokens_of_masked_rows_change(function, vocabulary, rows, dtype, device):
    torch.manual_seed(vocabulary)
    logits = torch.randn(5, vocabulary + 3, dtype=dtype)[:, :vocabulary]  # its rows need not be dense
    words = -(-vocabulary // 32)
    masks = torch.randint(-(2**31), 2**31, (len(rows), words), dtype=torch.int64).int()
    expected = logits.clone()
    for row, mask in zip(rows, masks.tolist(), strict=True):
        for token in range(vocabulary):
            if not mask[token // 32] >> token % 32 & 1:
                expected[row, token] = -torch.inf
    on_device = logits.to(device)
    function(on_device, torch.tensor(rows, dtype=torch.int64, device=device), masks.to(device))
    assert torch.equal(on_device.cpu(), expected)
