"""How safetensors files have matrices of integers of few bits, of which any part can be read.

A matrix [outputs, inputs] has a scale and a zero point for each group of inputs of each output. Some files
have all of it with inputs first. `Words` tell how words of 32 bits have integers. Parts are slices as
safetensors has them; ranges are of whole outputs or inputs, [begin, end).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from quire.engine.models.packed_words import WORD, Range, Whole, Words, read_part, words_of

_OF_AWQ = Whole(4, (0, 4, 1, 5, 2, 6, 3, 7))  # where a word has the integers of eight outputs


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
        return int(self.words.get_shape()[0]) * WORD // self.bits

    @property
    def groups(self) -> int:
        return int(self.scales.get_shape()[0])

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
    def zeros_shape(self) -> list[int]:
        return [self.groups, _OF_AWQ.count(self.outputs)]

    def integers(self, outputs: Range, inputs: Range, device: torch.device) -> Tensor:
        return _OF_AWQ.read(self.words, inputs, outputs, 1, device)

    def zeros(self, outputs: Range, device: torch.device) -> Tensor:
        return _OF_AWQ.read(self.zero_points, (0, self.groups), outputs, 1, device)

    def scales_of(self, outputs: Range, device: torch.device) -> Tensor:
        return read_part(self.scales, (0, self.groups), outputs, device)


@dataclass(frozen=True, slots=True)
class CompressedWords:
    """words [outputs, inputs / n], scales [outputs, groups], zero points [outputs / n, groups] or None.

    Without any the zero point is the middle of the range. The last word of a row need not be full.
    """

    inputs_first: ClassVar[bool] = False

    words: Any
    scales: Any
    zero_points: Any
    packing: Words
    inputs: int

    @property
    def outputs(self) -> int:
        return int(self.words.get_shape()[0])

    @property
    def groups(self) -> int:
        return _groups(self.scales)

    @property
    def zeros_shape(self) -> list[int]:
        return [self.packing.count(self.outputs), self.groups]

    def integers(self, outputs: Range, inputs: Range, device: torch.device) -> Tensor:
        return self.packing.read(self.words, outputs, inputs, 1, device)

    def zeros(self, outputs: Range, device: torch.device) -> Tensor:
        if self.zero_points is None:
            return torch.full(
                (1, self.groups), 1 << (self.packing.bits - 1), dtype=torch.int32, device=device
            )
        return self.packing.read(self.zero_points, outputs, (0, self.groups), 0, device)

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
        return read_part(self.bytes, outputs, inputs, device).int()

    def zeros(self, outputs: Range, device: torch.device) -> Tensor:
        if self.zero_points is None:
            return torch.zeros((1, self.groups), dtype=torch.int32, device=device)
        return _of_outputs(self.zero_points, outputs, device).int()

    def scales_of(self, outputs: Range, device: torch.device) -> Tensor:
        return _of_outputs(self.scales, outputs, device)


@dataclass(frozen=True, slots=True)
class PairsOfOutputs:
    """Bytes [outputs / 2, inputs] of two integers with a sign, the lower bits first, of 4 bits each.

    scales [outputs, groups].
    """

    inputs_first: ClassVar[bool] = False
    zeros_shape: ClassVar[list[int]] = []  # files have none

    bytes: Any
    scales: Any

    @property
    def outputs(self) -> int:
        return 2 * int(self.bytes.get_shape()[0])

    @property
    def inputs(self) -> int:
        return int(self.bytes.get_shape()[1])

    @property
    def groups(self) -> int:
        return _groups(self.scales)

    def integers(self, outputs: Range, inputs: Range, device: torch.device) -> Tensor:
        begin, end = outputs
        held = read_part(self.bytes, (begin // 2, -(-end // 2)), inputs, device).view(torch.int8)
        low, high = held << 4 >> 4, held >> 4  # with their signs
        return torch.stack((low, high), dim=1).flatten(0, 1)[begin % 2 :][: end - begin].int()

    def zeros(self, outputs: Range, device: torch.device) -> Tensor:
        return torch.zeros((1, self.groups), dtype=torch.int32, device=device)

    def scales_of(self, outputs: Range, device: torch.device) -> Tensor:
        return _of_outputs(self.scales, outputs, device)


def _groups(scales: Any) -> int:
    """Return the groups of scales [outputs, groups]; one, if they are of outputs or the matrix as wholes."""
    shape = scales.get_shape()
    return int(shape[1]) if len(shape) == 2 else 1


def _of_outputs(held: Any, outputs: Range, device: torch.device) -> Tensor:
    """Return what a tensor [outputs, groups], [outputs], or of one number has for a range of outputs."""
    if len(held.get_shape()) == 2 and held.get_shape() != [1, 1]:
        return read_part(held, outputs, (0, _groups(held)), device)
    whole: Tensor = held[...].to(device).reshape(-1, 1)
    return whole if len(whole) == 1 else whole[slice(*outputs)]
