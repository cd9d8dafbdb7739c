"""How words of 32 bits have integers of few bits, the lowest bits first, of which any range can be read.

A matrix of words has integers along one of its dimensions, `dim`. Ranges are of integers there, and of rows
or columns in the other. Words are slices as safetensors has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

WORD = 32  # bits
Range: TypeAlias = tuple[int, int]  # [begin, end)


class Words(Protocol):
    """A way in which words have integers."""

    @property
    def bits(self) -> int: ...

    def count(self, integers: int) -> int:
        """Return how many words have so many integers."""

    def read(self, words: Any, rows: Range, columns: Range, dim: int, device: torch.device) -> Tensor:
        """Return the integers of ranges of rows and columns."""


@dataclass(frozen=True, slots=True)
class Whole:
    """Each word has as many integers as fit whole, so that bits may be left over at its end.

    places: where it has them; None: in their order.
    """

    bits: int
    places: tuple[int, ...] | None = None

    def count(self, integers: int) -> int:
        return -(-integers // (WORD // self.bits))

    def read(self, words: Any, rows: Range, columns: Range, dim: int, device: torch.device) -> Tensor:
        count = WORD // self.bits
        begin, end = (rows, columns)[dim]
        found = _between(words, rows, columns, dim, (begin // count, -(-end // count)), device)
        shifts = torch.tensor(self.places or range(count), dtype=torch.int32, device=device) * self.bits
        integers = (found.unsqueeze(dim + 1) >> (shifts[:, None] if dim == 0 else shifts)) & _mask(self.bits)
        return integers.flatten(dim, dim + 1).narrow(dim, begin % count, end - begin)


@dataclass(frozen=True, slots=True)
class Dense:
    """Integers follow each other without a gap: a word may end within one, whose higher bits the next has."""

    bits: int

    def count(self, integers: int) -> int:
        return -(-integers * self.bits // WORD)

    def read(self, words: Any, rows: Range, columns: Range, dim: int, device: torch.device) -> Tensor:
        begin, end = (rows, columns)[dim]
        first = begin * self.bits // WORD
        found = _between(words, rows, columns, dim, (first, self.count(end)), device).long() & _mask(WORD)
        starts = torch.arange(begin, end, device=device) * self.bits - first * WORD
        last = max(found.shape[dim] - 1, 0)  # behind the last one nothing is needed
        low, high = starts // WORD, (starts // WORD + 1).clamp(max=last)
        pairs = found.index_select(dim, low) | found.index_select(dim, high) << WORD
        shifts = starts % WORD
        return ((pairs >> (shifts[:, None] if dim == 0 else shifts)) & _mask(self.bits)).int()


def words_of(bits: int) -> Words:
    """Return how words have integers where none of their bits is left over."""
    return Dense(bits) if WORD % bits else Whole(bits)


def read_part(held: Any, rows: Range, columns: Range, device: torch.device) -> Tensor:
    """Return ranges of a matrix."""
    part: Tensor = held[slice(*rows), slice(*columns)]
    return part.to(device)


def _between(words: Any, rows: Range, columns: Range, dim: int, whole: Range, device: torch.device) -> Tensor:
    return read_part(words, *((whole, columns) if dim == 0 else (rows, whole)), device)


def _mask(bits: int) -> int:
    return (1 << bits) - 1
