"""In which blocks decodes find and leave states: by the definition of a table of blocks."""

import pytest
import torch

from quire.kernels.recurrence.decode_blocks import ROWS, decode_blocks, decode_blocks_reference
from quire.kernels.recurrence.step import NO_STATE, PADS

SIZE = 4
FUNCTIONS = [decode_blocks, decode_blocks_reference]


def numbers(values, device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_blocks_are_those_of_the_tokens_before_and_of_the_decodes_own(function, device):
    """The first of a sequence, its second, one that begins a block, one behind it, and one that pads."""
    tables = numbers([[[10, 11, 12], [20, 21, 22], [30, 31, 32]]], device)
    rows, lens = numbers([2, 0, 1, 1, 0], device), numbers([1, 2, SIZE + 1, SIZE + 2, 0], device)
    before, after = function(tables, rows, lens, SIZE)
    assert before.tolist() == [[NO_STATE, 10, 20, 21, NO_STATE]]
    assert after.tolist() == [[30, 10, 21, 21, PADS]]
    assert before.dtype == after.dtype == torch.int32


@pytest.mark.parametrize("count", [0, 1, ROWS + 3])
def test_kernel_equals_reference(count, device):
    torch.manual_seed(0)
    tables = torch.randint(0, 900, (3, 7, 12), dtype=torch.int32, device=device)[:, :, :6]
    rows = torch.randint(0, 7, (count,), dtype=torch.int32, device=device)
    lens = torch.randint(0, 6 * SIZE + 1, (count,), dtype=torch.int32, device=device)
    for ours, theirs in zip(
        decode_blocks(tables, rows, lens, SIZE),
        decode_blocks_reference(tables, rows, lens, SIZE),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
