"""How safetensors files have matrices of integers of few bits, of which any part can be read.

A matrix [outputs, inputs] has a scale and a zero point for each group of inputs of each output. The files of
these layouts have all of it with inputs first; `packed_rows` has the others. `Words` tell how words of 32
bits have integers. Parts are slices as safetensors has them; ranges are of whole outputs or inputs,
[begin, end).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from quire.engine.models.packed_words import WORD, Range, Whole, read_part, words_of

_OF_AWQ = Whole(4, (0, 4, 1, 5, 2, 6, 3, 7))  # where a word has the integers of eight outputs


class Layout(Protocol):
    """Parts of a matrix [outputs, inputs] with so many groups of inputs."""

    inputs_first: ClassVar[bool]
    signed: ClassVar[bool]  # integers are about zero

    @property
    def scales(self) -> Any: ...

    @property
    def bits(self) -> int: ...

    @property
    def has_zeros(self) -> bool:
        """Return whether files have zero points of it."""

    @property
    def outputs(self) -> int: ...

    @property
    def inputs(self) -> int: ...

    @property
    def groups(self) -> int: ...

    @property
    def scales_shape(self) -> list[int]:
        """Return the shape that files have scales in, where each group has its own."""

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
    signed: ClassVar[bool] = False
    has_zeros: ClassVar[bool] = True

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
        return int(self.words.get_shape()[0]) * WORD // self.bits

    @property
    def groups(self) -> int:
        return int(self.scales.get_shape()[0])

    @property
    def scales_shape(self) -> list[int]:
        return [self.groups, self.outputs]

    @property
    def zeros_shape(self) -> list[int]:
        return [self.groups, words_of(self.bits).count(self.outputs)]

    def integers(self, outputs: Range, inputs: Range, device: torch.device) -> Tensor:
        return words_of(self.bits).read(self.words, inputs, outputs, 0, device)

    def zeros(self, outputs: Range, device: torch.device) -> Tensor:
        stored = words_of(self.bits).read(self.zero_points, (0, self.groups), outputs, 1, device)
        return (stored + self.zeros_less) & ((1 << self.bits) - 1)

    def scales_of(self, outputs: Range, device: torch.device) -> Tensor:
        return read_part(self.scales, (0, self.groups), outputs, device)


@dataclass(frozen=True, slots=True)
class Awq:
    """words [inputs, outputs / 8], scales [groups, outputs], zero points [groups, outputs / 8], of 4 bits."""

    inputs_first: ClassVar[bool] = True
    signed: ClassVar[bool] = False
    has_zeros: ClassVar[bool] = True
    bits: ClassVar[int] = _OF_AWQ.bits

    words: Any
    scales: Any
    zero_points: Any

    @property
    def outputs(self) -> int:
        return int(self.words.get_shape()[1]) * WORD // _OF_AWQ.bits

    @property
    def inputs(self) -> int:
        return int(self.words.get_shape()[0])

    @property
    def groups(self) -> int:
        return int(self.scales.get_shape()[0])

    @property
    def scales_shape(self) -> list[int]:
        return [self.groups, self.outputs]

    @property
    def zeros_shape(self) -> list[int]:
        return [self.groups, _OF_AWQ.count(self.outputs)]

    def integers(self, outputs: Range, inputs: Range, device: torch.device) -> Tensor:
        return _OF_AWQ.read(self.words, inputs, outputs, 1, device)

    def zeros(self, outputs: Range, device: torch.device) -> Tensor:
        return _OF_AWQ.read(self.zero_points, (0, self.groups), outputs, 1, device)

    def scales_of(self, outputs: Range, device: torch.device) -> Tensor:
        return read_part(self.scales, (0, self.groups), outputs, device)
