"""How safetensors files have matrices of integers of few bits, of which any part can be read.

A word of 32 bits has several integers, the lowest bits first. A matrix [outputs, inputs] has a scale and a
zero point for each group of inputs of each output. Some files have all of it with inputs first. Parts are
slices as safetensors has them; ranges are of whole outputs or inputs, [begin, end).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

WORD = 32  # bits
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where a word has the integers of eight outputs

Range: TypeAlias = tuple[int, int]


class Layout(Protocol):
    """Parts of a matrix [outputs, inputs] with so many groups of inputs."""

    inputs_first: ClassVar[bool]

    @property
    def outputs(self) -> int: ...

    @property
    def inputs(self) -> int: ...

    @property
    def groups(self) -> int: ...

    @property
    def zeros_shape(self) -> list[int]:
        """Return the shape that files have zero points in."""

    def integers(self, outputs: Range, inputs: Range, device: torch.device) -> Tensor:
        """Return [outputs, inputs], or [inputs, outputs]."""

    def zeros(self, outputs: Range, device: torch.device) -> Tensor:
        """Return zero points of `integers`, [outputs or 1, groups], or [groups, outputs]."""

    def scales_of(self, outputs: Range, device: torch.device) -> Tensor:
        """Return scales likewise."""


@dataclass(frozen=True, slots=True)
class Gptq:
    """words [inputs / n, outputs], scales [groups, outputs], zero points [groups, outputs / n].

    As AutoGPTQ writes them zero points are less by one (`zeros_less`), as GPTQModel's second version not.
    """

    inputs_first: ClassVar[bool] = True

    words: Any
    scales: Any
    zero_points: Any
    bits: int
    zeros_less: int

    @property
    def outputs(self) -> int:
        return int(self.words.get_shape()[1])

    @property
    def inputs(self) -> int:
        return int(self.words.get_shape()[0]) * (WORD // self.bits)

    @property
    def groups(self) -> int:
        return int(self.scales.get_shape()[0])

    @property
    def zeros_shape(self) -> list[int]:
        return [self.groups, _words(self.outputs, self.bits)]

    def integers(self, outputs: Range, inputs: Range, device: torch.device) -> Tensor:
        return _unpacked(self.words, inputs, outputs, 0, self.bits, device)

    def zeros(self, outputs: Range, device: torch.device) -> Tensor:
        stored = _unpacked(self.zero_points, (0, self.groups), outputs, 1, self.bits, device)
        return (stored + self.zeros_less) & _mask(self.bits)

    def scales_of(self, outputs: Range, device: torch.device) -> Tensor:
        return _read(self.scales, (0, self.groups), outputs, device)


@dataclass(frozen=True, slots=True)
class Awq:
    """words [inputs, outputs / 8], scales [groups, outputs], zero points [groups, outputs / 8], of 4 bits."""

    inputs_first: ClassVar[bool] = True

    words: Any
    scales: Any
    zero_points: Any

    @property
    def outputs(self) -> int:
        return int(self.words.get_shape()[1]) * len(_AWQ_PLACES)

    @property
    def inputs(self) -> int:
        return int(self.words.get_shape()[0])

    @property
    def groups(self) -> int:
        return int(self.scales.get_shape()[0])

    @property
    def zeros_shape(self) -> list[int]:
        return [self.groups, _words(self.outputs, 4)]

    def integers(self, outputs: Range, inputs: Range, device: torch.device) -> Tensor:
        return _unpacked(self.words, inputs, outputs, 1, 4, device, _AWQ_PLACES)

    def zeros(self, outputs: Range, device: torch.device) -> Tensor:
        return _unpacked(self.zero_points, (0, self.groups), outputs, 1, 4, device, _AWQ_PLACES)

    def scales_of(self, outputs: Range, device: torch.device) -> Tensor:
        return _read(self.scales, (0, self.groups), outputs, device)


@dataclass(frozen=True, slots=True)
class CompressedWords:
    """words [outputs, inputs / n], scales [outputs, groups], zero points [outputs / n, groups] or None.

    Without any the zero point is the middle of the range. The last word of a row need not be full.
    """

    inputs_first: ClassVar[bool] = False

    words: Any
    scales: Any
    zero_points: Any
    bits: int
    inputs: int

    @property
    def outputs(self) -> int:
        return int(self.words.get_shape()[0])

    @property
    def groups(self) -> int:
        return _groups(self.scales)

    @property
    def zeros_shape(self) -> list[int]:
        return [_words(self.outputs, self.bits), self.groups]

    def integers(self, outputs: Range, inputs: Range, device: torch.device) -> Tensor:
        return _unpacked(self.words, outputs, inputs, 1, self.bits, device)

    def zeros(self, outputs: Range, device: torch.device) -> Tensor:
        if self.zero_points is None:
            return torch.full((1, self.groups), 1 << (self.bits - 1), dtype=torch.int32, device=device)
        return _unpacked(self.zero_points, outputs, (0, self.groups), 0, self.bits, device)

    def scales_of(self, outputs: Range, device: torch.device) -> Tensor:
        return _of_outputs(self.scales, outputs, device)


@dataclass(frozen=True, slots=True)
class CompressedBytes:
    """Bytes [outputs, inputs] with a sign, scales and zero points [outputs, groups]; None: these are zero."""

    inputs_first: ClassVar[bool] = False

    bytes: Any
    scales: Any
    zero_points: Any

    @property
    def outputs(self) -> int:
        return int(self.bytes.get_shape()[0])

    @property
    def inputs(self) -> int:
        return int(self.bytes.get_shape()[1])

    @property
    def groups(self) -> int:
        return _groups(self.scales)

    @property
    def zeros_shape(self) -> list[int]:
        shape: list[int] = self.scales.get_shape()
        return shape

    def integers(self, outputs: Range, inputs: Range, device: torch.device) -> Tensor:
        return _read(self.bytes, outputs, inputs, device).int()

    def zeros(self, outputs: Range, device: torch.device) -> Tensor:
        if self.zero_points is None:
            return torch.zeros((1, self.groups), dtype=torch.int32, device=device)
        return _of_outputs(self.zero_points, outputs, device).int()

    def scales_of(self, outputs: Range, device: torch.device) -> Tensor:
        return _of_outputs(self.scales, outputs, device)


def _words(integers: int, bits: int) -> int:
    return -(-integers * bits // WORD)


def _mask(bits: int) -> int:
    return (1 << bits) - 1


def _groups(scales: Any) -> int:
    """Return the groups of scales [outputs, groups]; one, if they are of outputs or the matrix as wholes."""
    shape = scales.get_shape()
    return int(shape[1]) if len(shape) == 2 else 1


def _of_outputs(held: Any, outputs: Range, device: torch.device) -> Tensor:
    """Return what a tensor [outputs, groups], [outputs], or of one number has for a range of outputs."""
    if len(held.get_shape()) == 2 and held.get_shape() != [1, 1]:
        return _read(held, outputs, (0, _groups(held)), device)
    whole: Tensor = held[...].to(device).reshape(-1, 1)
    return whole if len(whole) == 1 else whole[slice(*outputs)]


def _read(held: Any, rows: Range, columns: Range, device: torch.device) -> Tensor:
    part: Tensor = held[slice(*rows), slice(*columns)]
    return part.to(device)


def _unpacked(
    words: Any,
    rows: Range,
    columns: Range,
    dim: int,
    bits: int,
    device: torch.device,
    places: tuple[int, ...] | None = None,
) -> Tensor:
    """Return the integers of ranges of rows and columns, of which a word has several along `dim`.

    places: where it has them, None: in their order.
    """
    count = WORD // bits
    begin, end = (rows, columns)[dim]
    whole = begin // count, -(-end // count)
    found = _read(words, *((whole, columns) if dim == 0 else (rows, whole)), device).unsqueeze(dim + 1)
    shifts = torch.tensor(places or range(count), dtype=torch.int32, device=device) * bits
    integers = (found >> (shifts[:, None] if dim == 0 else shifts)) & _mask(bits)
    return integers.flatten(dim, dim + 1).narrow(dim, begin % count, end - begin)
