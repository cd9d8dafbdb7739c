"""Kernels compiled beside each other and later run, against their reference."""

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.attention.token_places import token_places, token_places_reference
from quire.kernels.compiling import ZerosForNothing, compiling_beside, only_compiled
from quire.kernels.pointwise.norm import add_rms_norm, add_rms_norm_reference
from quire.kernels.pointwise.pinned_copy import copy_pinned


@triton.jit
def _filled(out, VALUE: tl.constexpr) -> None:
    tl.store(out + tl.arange(0, 16), tl.full((16,), VALUE, tl.float32))


@triton.jit
def _impossible(out, SIZE: tl.constexpr) -> None:
    tl.store(out + tl.arange(0, SIZE), 1.0)  # of no power of two


def test_what_is_only_compiled_writes_nothing_and_runs_later(device):
    out, steps = torch.zeros(16, device=device), []
    with compiling_beside(lambda done, total: steps.append((done, total))), only_compiled():
        _filled[(1,)](out, 3)
        _filled[(1,)](out, 3)
    compiled = device.type == "cuda"
    assert steps == [(1, 1)] * compiled
    assert (out == 0).all() == compiled
    _filled[(1,)](out, 3)
    assert (out == 3).all()


def test_what_cannot_be_compiled_is_raised_and_harms_nobody(device):
    out = torch.zeros(16, device=device)
    with (
        pytest.raises(Exception, match="must be a power of 2"),
        compiling_beside(lambda done, total: None),
        only_compiled(),
    ):
        _impossible[(1,)](out, 12)
    with compiling_beside(lambda done, total: None), only_compiled():
        _filled[(1,)](out, 4)
    _filled[(1,)](out, 4)
    assert (out == 4).all()


def test_what_becomes_an_index_is_there(device):
    rows, positions, given = (
        torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, 1, 1], [5, 17, -1], [7, -1, 3])
    )
    last_tokens = torch.tensor([11, 12], dtype=torch.int32, device=device)
    tables = [torch.tensor([[4, 5], [2, 9]], dtype=torch.int32, device=device)]
    copied = torch.zeros_like(rows)
    with compiling_beside(lambda done, total: None), only_compiled():
        got = token_places(given, rows, positions, last_tokens, tables, 16)
        copy_pinned(copied, rows)
    expected = token_places_reference(given, rows, positions, last_tokens, tables, 16)
    assert all(torch.equal(*pair) for pair in zip((*got, copied), (*expected, rows), strict=True))


def test_kernels_run_again_after_an_error(device):
    with pytest.raises(KeyError), compiling_beside(lambda done, total: None), only_compiled():
        raise KeyError
    x, residual, weight = torch.randn(3, 4, 64, device=device).unbind()
    expected, _ = add_rms_norm_reference(x, residual.clone(), weight[0], 1e-6)
    torch.testing.assert_close(add_rms_norm(x, residual, weight[0], 1e-6)[0], expected)


def test_what_no_kernel_writes_is_zeros(device):
    table = torch.randn(3, 4, device=device)
    with ZerosForNothing(), only_compiled():
        made = [
            torch.empty(5, dtype=torch.int64, device=device),
            torch.empty_like(table),
            table.new_empty(2, 3),
            torch.empty_strided((2, 3), (1, 2), device=device),
        ]
        assert torch.equal(table[made[0]], table[0].expand(5, 4))
    assert not any(each.any() for each in made)
