"""Copies to and from pinned memory: bit for bit, and nothing beside."""

import pytest
import torch

from kernels.pinned_copy import copy_pinned


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (3, 4), (1024,), (2, 1300)])
def test_copies_all_words_and_no_others(shape, dtype, to_host, device):
    count = torch.Size(shape).numel()
    words = (
        torch.arange(1, count + 9).to(dtype) / 3 if dtype.is_floating_point else torch.arange(1, count + 9)
    )
    words = words.to(dtype)
    pinned = torch.zeros(count + 8, dtype=dtype, pin_memory=device.type == "cuda")
    on_device = torch.zeros(count + 8, dtype=dtype, device=device)
    source, target = (on_device, pinned) if to_host else (pinned, on_device)
    source.copy_(words)
    copy_pinned(target[4 : count + 4].view(shape), source[4 : count + 4].view(shape))
    if device.type == "cuda":
        torch.cuda.synchronize()
    expected = torch.zeros(count + 8, dtype=dtype)
    expected[4 : count + 4] = words[4 : count + 4]
    assert torch.equal(target.cpu(), expected)


def test_what_does_not_fit_is_refused(device):
    source = torch.zeros(4, 4, dtype=torch.int32, device=device)
    for target in (torch.zeros(4, 5, dtype=torch.int32), torch.zeros(4, 8, dtype=torch.int32)[:, ::2]):
        with pytest.raises(ValueError, match="contiguous tensors of as many bytes"):
            copy_pinned(target.to(device) if target.is_contiguous() else target, source)
