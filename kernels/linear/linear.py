"""A linear layer of a model, and its product by torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.parallel.ranks import SumOverRanks
from quire.kernels.quantised.weight import WeightFormat

MOST_TOKENS_OF_LT = 384  # beyond, cuBLASLt is no better at long sums, and up to 15 % worse


Share = Literal["whole", "inputs"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer's weight [outputs, inputs] as the choice of kernels sees it.

    format: how its numbers are held; dense is in the dtype that is computed in. share: the part of it that is
    on this device; with some of the inputs its products are parts of sums over ranks.
    """

    outputs: int
    inputs: int
    biased: bool = False
    format: Literal["dense"] | WeightFormat = "dense"
    share: Share = "whole"

    @property
    def elements(self) -> int:
        return self.outputs * self.inputs


class Linear:
    """weight [out, in], bias [out] or None: x [T, in] -> [T, out], by torch.

    ranks: if this rank has some of the inputs, what sums the products of all ranks.
    """

    __slots__ = ("_few_added", "bias", "format", "ranks", "share", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, ranks: SumOverRanks | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.ranks = ranks
        self.format: Literal["dense"] = "dense"
        self.share: Share = "whole" if ranks is None else "inputs"
        self._few_added = bias
        outputs, inputs = weight.shape
        if bias is None and weight.is_cuda and inputs > 2 * outputs:
            # torch asks cuBLASLt instead of cuBLAS when it adds a bias, and that divides long sums of few
            # tokens better: 45 against 53 µs at 128 tokens, 14336 -> 4096 on an H100.
            self._few_added = torch.zeros(outputs, dtype=weight.dtype, device=weight.device)

    @property
    def matrix(self) -> Matrix:
        outputs, inputs = self.weight.shape
        return Matrix(outputs, inputs, self.bias is not None, self.format, self.share)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply by the whole weight: with some of the inputs here, sum over the ranks."""
        return self.part(x) if self.ranks is None else self.ranks.all_reduce(self.part(x))

    def part(self, x: Tensor) -> Tensor:
        """Multiply by what is here of the weight."""
        return F.linear(x, self.weight, self._few_added if len(x) <= MOST_TOKENS_OF_LT else self.bias)
