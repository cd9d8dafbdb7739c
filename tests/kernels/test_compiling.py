"""Kernels compiled together, against themselves."""

import torch

from kernels.compiling import only_compiled
from kernels.norm import add_rms_norm, add_rms_norm_reference


def test_what_is_only_compiled_writes_nothing_and_runs_later(device):
    x, residual, weight = torch.randn(3, 40, 72, device=device).unbind()
    before = residual.clone()
    with only_compiled():
        add_rms_norm(x, residual, weight[0], 1e-6)
    if device.type == "cuda":
        assert torch.equal(residual, before)
    residual.copy_(before)
    got, added = add_rms_norm(x, residual, weight[0], 1e-6)
    expected, sums = add_rms_norm_reference(x, before, weight[0], 1e-6)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(added, sums)


def test_kernels_run_again_after_an_error(device):
    try:
        with only_compiled():
            raise KeyError
    except KeyError:
        pass
    x, residual, weight = torch.randn(3, 4, 64, device=device).unbind()
    expected, _ = add_rms_norm_reference(x, residual.clone(), weight[0], 1e-6)
    torch.testing.assert_close(add_rms_norm(x, residual, weight[0], 1e-6)[0], expected)
