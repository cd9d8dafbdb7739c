"""A linear layer of a model whose weight is kept in few bits, and its product by torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from quire.kernels.gpu import gpu_of
from quire.kernels.linear.linear import Matrix, Share
from quire.kernels.parallel.ranks import SumOverRanks
from quire.kernels.quantised.expand import DTYPES, expand
from quire.kernels.quantised.weight import QuantisedWeight, expand_reference


class QuantisedLinear:
    """weight [out, in], bias [out] or None: x [T, in] -> [T, out], by the numbers that it stands for.

    ranks: if this rank has some of the inputs, what sums the products of all ranks.
    """

    __slots__ = ("bias", "ranks", "share", "weight")

    def __init__(
        self, weight: QuantisedWeight, bias: Tensor | None, ranks: SumOverRanks | None = None
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.ranks = ranks
        self.share: Share = "whole" if ranks is None else "inputs"

    @property
    def matrix(self) -> Matrix:
        return Matrix(*self.weight.shape, self.bias is not None, self.weight.format, self.share)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply by the whole weight: with some of the inputs here, sum over the ranks."""
        return self.part(x) if self.ranks is None else self.ranks.all_reduce(self.part(x))

    def part(self, x: Tensor) -> Tensor:
        """Multiply by what is here of the weight, expanded for it."""
        by_kernel = gpu_of(x.device).has_kernels and x.dtype in DTYPES
        expanded = (expand if by_kernel else expand_reference)(self.weight, x.dtype)
        return F.linear(x, expanded, self.bias)
