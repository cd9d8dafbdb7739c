"""Token ids, positions and slots, against looking each token up by hand."""

import pytest
import torch

from quire.kernels.attention.token_places import token_places, token_places_reference

ROWS, BLOCKS = 9, 6


@pytest.mark.parametrize("function", [token_places, token_places_reference])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("all_sampled", [False, True])
@pytest.mark.parametrize("count", [1, 7, 300])
def test_each_token_is_found(function, block_size, all_sampled, count, device):
    torch.manual_seed(count)
    last_tokens = torch.randint(0, 1000, (ROWS,), dtype=torch.int32)
    tables = torch.randint(0, 2**31 - 1, (ROWS, BLOCKS), dtype=torch.int32)  # slots need 64 bits
    rows = torch.randint(0, ROWS, (count,), dtype=torch.int32)
    positions = torch.randint(-1, BLOCKS * block_size, (count,), dtype=torch.int32)
    given = torch.randint(-1, 2, (count,), dtype=torch.int32) * torch.randint(1, 9, (count,)).int()
    results = function(
        None if all_sampled else given.to(device),
        rows.to(device),
        positions.to(device),
        last_tokens.to(device),
        tables.to(device),
        block_size,
    )
    assert [result.dtype for result in results] == [torch.int32, torch.int32, torch.int64]
    for i, (token, place, slot) in enumerate(zip(*(result.tolist() for result in results), strict=True)):
        row, position = int(rows[i]), int(positions[i])
        sampled = all_sampled or given[i] < 0
        assert token == (last_tokens[row] if sampled else given[i])
        assert place == max(position, 0)
        if position < 0:
            assert slot == -1
        else:
            assert slot == int(tables[row, position // block_size]) * block_size + position % block_size
