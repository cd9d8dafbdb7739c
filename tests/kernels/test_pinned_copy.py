"""Copies to and from pinned memory: bit for bit, and nothing beside."""

import pytest
import torch

from quire.kernels.pointwise.pinned_copy import copy_pinned


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5, 1024, 2600])
def test_copies_all_words_and_no_others(count, to_host, device):
    words = torch.arange(1, count + 9, dtype=torch.int32) * 0x01010101
    pinned = torch.zeros(count + 8, dtype=torch.int32, pin_memory=device.type == "cuda")
    on_device = torch.zeros(count + 8, dtype=torch.int32, device=device)
    source, target = (on_device, pinned) if to_host else (pinned, on_device)
    source.copy_(words)
    copy_pinned(target[4 : count + 4], source[4 : count + 4])
    if device.type == "cuda":
        torch.cuda.synchronize()
    expected = torch.zeros(count + 8, dtype=torch.int32)
    expected[4 : count + 4] = words[4 : count + 4]
    assert torch.equal(target.cpu(), expected)


def test_what_does_not_fit_is_refused(device):
    source = torch.zeros(20, dtype=torch.int32, device=device)
    for target in (source[:19], source.repeat(2)[::2], source.view(4, 5), source.float()):
        for pair in ((target, source), (source, target)):
            with pytest.raises(ValueError, match=r"two contiguous tensors .* of int32"):
                copy_pinned(*pair)
