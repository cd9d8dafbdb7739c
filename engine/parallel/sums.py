"""Sums over ranks in the order of the ranks, of numbers that a library only carries."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from quire.kernels.parallel.terms import sum_terms, sum_terms_reference


def sum_in_order(terms: Tensor) -> Tensor:
    """Add terms [size, …], contiguous, one a rank -> […], in fp32 and rounded once."""
    add = sum_terms if terms.is_cuda else sum_terms_reference
    return add(terms.view(len(terms), -1)).view(terms.shape[1:])


def sum_in_slices(
    x: Tensor, size: int, exchange: Callable[[Tensor], Tensor], gather: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the sum of every rank's x, of which each of `size` ranks adds up a slice.

    exchange: of x [size, N], row i for rank i -> the row for this rank of every rank. gather: of x [N] ->
    every rank's [size, N]. Each number moves twice, however many ranks there are.
    """
    length = -(-x.numel() // size)
    rows = F.pad(x.reshape(-1), (0, length * size - x.numel())).view(size, length)
    sums = gather(sum_in_order(exchange(rows)))
    return sums.view(-1)[: x.numel()].view(x.shape)
