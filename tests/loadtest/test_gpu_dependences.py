"""Steps that `gpu_dependences` times: by either way each takes what all of the one before wrote."""

from __future__ import annotations

import torch

from quire.loadtest.gpu_dependences import by_barriers, by_kernels, reference


def test_kernels_take_the_steps() -> None:
    pair = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    expected = reference(pair[0], 5)
    by_kernels(pair, 5, programs=8, warps=4)
    torch.testing.assert_close(pair[1], expected)


def test_one_kernel_takes_the_steps() -> None:
    pair = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    expected = reference(pair[0], 4)
    by_barriers(pair, 4, programs=1, warps=4)  # the interpreter runs programs one after the other
    torch.testing.assert_close(pair[0], expected)
