"""Shares: which parts of a model's tensors a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.engine.models.config import rows_of_rank

Range = tuple[int, int]  # begin and end


class Columns(NamedTuple):
    """Outputs of a projection that are divided among the ranks.

    size: how many a rank has. copies: ranks that have the same ones.
    """

    size: int
    copies: int = 1

    def of_all(self, ranks: int) -> int:
        """Return how many there are."""
        return self.size * ranks // self.copies

    def of_rank(self, rank: int) -> Range:
        """Return those of a rank."""
        begin = rank // self.copies * self.size
        return begin, begin + self.size


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a tensor of `shape`: of its dimension `dim` these ranges, one after the other."""

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[Range, ...]

    @property
    def length(self) -> int:
        """Return how many elements of the dimension the rank has."""
        return sum(end - begin for begin, end in self.ranges)

    @property
    def transposed(self) -> Share:
        """Return the same part of the transposed matrix."""
        return Share(self.shape[::-1], 1 - self.dim, self.ranges)

    def of(self, tensor: Tensor) -> Tensor:
        """Select the part from the whole tensor."""
        return torch.cat(
            [tensor.narrow(self.dim, begin, end - begin) for begin, end in self.ranges], self.dim
        )


def of_columns(parts: tuple[Columns, ...], rank: int, ranks: int) -> tuple[tuple[Range, ...], int]:
    """Return a rank's ranges of projections that stand one after the other, and how long all are together."""
    ranges, offset = [], 0
    for part in parts:
        begin, end = part.of_rank(rank)
        ranges.append((offset + begin, offset + end))
        offset += part.of_all(ranks)
    return tuple(ranges), offset


def of_vocabulary(tokens: int, rank: int, ranks: int) -> Range:
    """Return a rank's tokens, `rows_of_rank` of them; the last ranks may have fewer, or none."""
    size = rows_of_rank(tokens, ranks)
    return min(rank * size, tokens), min((rank + 1) * size, tokens)
