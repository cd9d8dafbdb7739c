"""Words to and from the host's memory, pinned where there is a device."""

import pytest
import torch

from kernels.host_copy import BLOCK, copy_words, copy_words_reference

UNTOUCHED = -7


@pytest.mark.parametrize("copy", [copy_words, copy_words_reference])
@pytest.mark.parametrize("count", [0, 1, 5, BLOCK, 2 * BLOCK + 3])
@pytest.mark.parametrize("to_host", [False, True])
def test_copies_those_words_and_no_more(copy, count, to_host, device):
    values = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).int()
    room = torch.full((count + BLOCK,), UNTOUCHED, dtype=torch.int32)
    host, there = (room, values) if to_host else (values, room)
    if device.type == "cuda":
        host = host.pin_memory()
    there = there.to(device)
    source, target = (there, host) if to_host else (host, there)
    copy(target[:count], source)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(target[:count].cpu(), values)
    assert (target[count:] == UNTOUCHED).all()


def test_what_are_not_as_many_words_is_refused(device):
    words = torch.zeros(4, dtype=torch.int32, device=device)
    for other in (words[:3], words.long(), words.view(2, 2)):
        with pytest.raises(ValueError, match="as many int32 words"):
            copy_words(words, other)
