"""Kernels compiled beside each other and later run, against their reference."""

import pytest
import torch

from kernels.compiling import compiling_beside, only_compiled
from kernels.norm import add_rms_norm, add_rms_norm_reference
from kernels.token_places import token_places, token_places_reference


def test_what_is_only_compiled_writes_nothing_and_runs_later(device):
    x, residual, weight = torch.randn(3, 40, 72, device=device).unbind()
    before, steps = residual.clone(), []
    with compiling_beside(lambda done, total: steps.append((done, total))), only_compiled():
        add_rms_norm(x, residual, weight[0], 1e-6)
    if device.type == "cuda":
        assert torch.equal(residual, before)
    assert all(step == (done, len(steps)) for done, step in enumerate(steps, 1))
    residual.copy_(before)
    got, added = add_rms_norm(x, residual, weight[0], 1e-6)
    expected, sums = add_rms_norm_reference(x, before, weight[0], 1e-6)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(added, sums)


def test_what_becomes_an_index_is_there(device):
    rows, positions, given = (
        torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, 1, 1], [5, 17, -1], [7, -1, 3])
    )
    last_tokens = torch.tensor([11, 12], dtype=torch.int32, device=device)
    tables = torch.tensor([[4, 5], [2, 9]], dtype=torch.int32, device=device)
    with compiling_beside(lambda done, total: None), only_compiled():
        got = token_places(given, rows, positions, last_tokens, tables, 16)
    expected = token_places_reference(given, rows, positions, last_tokens, tables, 16)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_kernels_run_again_after_an_error(device):
    with pytest.raises(KeyError), compiling_beside(lambda done, total: None), only_compiled():
        raise KeyError
    x, residual, weight = torch.randn(3, 4, 64, device=device).unbind()
    expected, _ = add_rms_norm_reference(x, residual.clone(), weight[0], 1e-6)
    torch.testing.assert_close(add_rms_norm(x, residual, weight[0], 1e-6)[0], expected)
