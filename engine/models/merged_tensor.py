"""A weight with an adapter's change, of which any part is computed where it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.engine.models.adapter_tensors import Change
from quire.engine.models.expanded_file import NAMES, ranges_of, round_once

_PIECE = 1 << 22  # numbers that are computed at once, in fp32
_Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MergedTensor:
    """A tensor of the base model, changed: computed in fp32, and rounded once.

    base: a slice, as safetensors has it. inputs_first: it is [inputs, outputs], and not the other way round.
    dtype, device: of what is read.
    """

    name: str
    base: Any
    change: Change
    inputs_first: bool
    dtype: torch.dtype
    device: torch.device

    def get_shape(self) -> list[int]:
        shape: list[int] = self.base.get_shape()
        return shape

    def get_dtype(self) -> str:
        return NAMES[self.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        """Read a range of each dimension. Raises ValueError for numbers that the dtype does not have."""
        ranges = ranges_of(index, self.get_shape())
        merged = torch.empty([end - begin for begin, end in ranges], dtype=self.dtype, device=self.device)
        if not merged.numel():
            return merged
        if len(ranges) == 1:
            round_once(merged, self._vector(ranges[0]), self.name)
            return merged
        (first, last), columns = ranges
        lengths = self._factors(columns if self.inputs_first else ranges[0])
        for begin, end in _pieces(first, last, self.get_shape()[1]):
            numbers = self._matrix((begin, end), columns)
            if lengths is not None:
                numbers *= lengths if self.inputs_first else lengths[begin - first : end - first, None]
            round_once(merged[begin - first : end - first], numbers, self.name)
        return merged

    def _vector(self, range_: _Range) -> Tensor:
        numbers = self._read(self.base, range_)
        if self.change.added is not None:
            numbers = numbers + self._read(self.change.added, range_) * self.change.scale
        return numbers

    def _matrix(self, rows: _Range, columns: _Range) -> Tensor:
        """Return a part in fp32, of which lengths are not yet what DoRA has."""
        change = self.change
        numbers = self._read(self.base, rows, columns)
        if change.down is not None:
            inputs, outputs = (rows, columns) if self.inputs_first else (columns, rows)
            whole = 0, change.down.get_shape()[0]
            down, up = self._read(change.down, whole, inputs), self._read(change.up, outputs, whole)
            numbers = numbers + (down.T @ up.T if self.inputs_first else up @ down) * change.scale
        if change.rows is not None:
            here = [at for at, token in enumerate(change.tokens) if rows[0] <= token < rows[1]]
            if here:
                places = torch.tensor([change.tokens[at] - rows[0] for at in here], device=self.device)
                own = self._read(change.rows, (0, len(change.tokens)), columns)
                numbers = numbers.index_copy(0, places, own[torch.tensor(here, device=self.device)])
        return numbers

    def _factors(self, outputs: _Range) -> Tensor | None:
        """Return by what weights of outputs are multiplied to have their lengths; None: by nothing."""
        if self.change.lengths is None:
            return None
        rows, columns = self.get_shape()
        squares = torch.zeros(outputs[1] - outputs[0], device=self.device)
        if self.inputs_first:
            for piece in _pieces(0, rows, columns):
                squares += self._matrix(piece, outputs).square().sum(0)
        else:
            for begin, end in _pieces(*outputs, columns):
                part = self._matrix((begin, end), (0, columns)).square().sum(1)
                squares[begin - outputs[0] : end - outputs[0]] = part
        return self._read(self.change.lengths, outputs) / squares.sqrt()

    def _read(self, held: Any, *ranges: _Range) -> Tensor:
        part: Tensor = held[tuple(slice(*each) for each in ranges)]
        return part.to(self.device, torch.float32)


def _pieces(begin: int, end: int, width: int) -> list[_Range]:
    """Return parts of a range of rows that have so many numbers each, or one row."""
    step = max(_PIECE // max(width, 1), 1)
    return [(at, min(at + step, end)) for at in range(begin, end, step)]
