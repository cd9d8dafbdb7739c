"""Token ids, positions and slots, against looking each token up by hand."""

import pytest
import torch

from quire.kernels.attention.token_places import token_places, token_places_reference

ROWS, BLOCKS, GROUPS = 9, 6, 3


@pytest.mark.parametrize("function", [token_places, token_places_reference])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("all_sampled", [False, True])
@pytest.mark.parametrize("count", [1, 7, 300])
def test_each_token_is_found(function, block_size, all_sampled, count, device):
    torch.manual_seed(count)
    last_tokens = torch.randint(0, 1000, (ROWS,), dtype=torch.int32)
    # Slots need 64 bits.
    tables = torch.randint(0, 2**31 - 1, (GROUPS, ROWS, BLOCKS), dtype=torch.int32)
    rows = torch.randint(0, ROWS, (count,), dtype=torch.int32)
    positions = torch.randint(-1, BLOCKS * block_size, (count,), dtype=torch.int32)
    given = torch.randint(-1, 2, (count,), dtype=torch.int32) * torch.randint(1, 9, (count,)).int()
    results = function(
        None if all_sampled else given.to(device),
        rows.to(device),
        positions.to(device),
        last_tokens.to(device),
        tables.to(device).unbind(),
        block_size,
    )
    assert [result.dtype for result in results] == [torch.int32, torch.int32, torch.int64]
    tokens, places, slots = (result.tolist() for result in results)
    assert len(slots) == GROUPS
    for i, (token, place, *own) in enumerate(zip(tokens, places, *slots, strict=True)):
        row, position = int(rows[i]), int(positions[i])
        sampled = all_sampled or given[i] < 0
        assert token == (last_tokens[row] if sampled else given[i])
        assert place == max(position, 0)
        if position < 0:
            assert own == [-1] * GROUPS
        else:
            blocks = tables[:, row, position // block_size].tolist()
            assert own == [block * block_size + position % block_size for block in blocks]


def test_tables_that_lie_apart_are_refused(device):
    tables = torch.zeros(3, ROWS, BLOCKS, dtype=torch.int32, device=device)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="one behind the other"):
        token_places(None, none, none, none, tables[::2].unbind(), 16)
