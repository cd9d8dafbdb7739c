"""Block copies: every layer of the named blocks, bit for bit, and nothing else."""

import pytest
import torch

from quire.kernels.pointwise.block_copy import copy_blocks, copy_blocks_reference

SHAPES = [(8, 2, 2, 2, 16, 64), (8, 1, 2, 1, 16, 80), (6, 3, 2, 2, 32, 128)]
PAIRS = {"none": [], "one": [(0, 5)], "shared source": [(1, 4), (1, 2), (3, 0)]}


@pytest.mark.parametrize("copy", [copy_blocks, copy_blocks_reference])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS.keys())
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_copies_named_blocks_and_nothing_else(copy, shape, pairs, index, device, dtype):
    cache = torch.randn(shape, device=device).to(dtype)
    cache[1, 0, 0, 0, 0, 0] = torch.nan  # a copy keeps unused slots' bits too
    expected = cache.clone()
    for source, destination in pairs:
        expected[destination] = cache[source]
    copy(cache, torch.tensor(pairs, dtype=index, device=device).view(-1, 2))
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_one_layer_of_the_cache_is_refused(device):
    cache = torch.zeros(4, 2, 2, 1, 16, 64, device=device)
    with pytest.raises(ValueError, match="whole, contiguous cache"):
        copy_blocks(cache[:, 0], torch.tensor([[0, 1]], device=device))
