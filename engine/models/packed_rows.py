"""How safetensors files have matrices of integers of few bits with outputs first, see `packed_layouts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire.engine.models.packed_words import WORD, Range, Whole, Words, read_part

_FOUR_BITS = Whole(4)


@dataclass(frozen=True, slots=True)
class CompressedWords:
    """words [outputs, inputs / n], scales [outputs, groups], zero points [outputs / n, groups] or None.

    Without any the zero point is the middle of the range. The last word of a row need not be full.
    """

    inputs_first: ClassVar[bool] = False
    signed: ClassVar[bool] = False

    words: Any
    scales: Any
    zero_points: Any
    packing: Words
    inputs: int

    @property
    def bits(self) -> int:
        return self.packing.bits

    @property
    def has_zeros(self) -> bool:
        return self.zero_points is not None

    @property
    def outputs(self) -> int:
        return int(self.words.get_shape()[0])

    @property
    def groups(self) -> int:
        return _groups(self.scales)

    @property
    def scales_shape(self) -> list[int]:
        return [self.outputs, self.groups]

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
    signed: ClassVar[bool] = True
    bits: ClassVar[int] = 8

    bytes: Any
    scales: Any
    zero_points: Any

    @property
    def has_zeros(self) -> bool:
        return self.zero_points is not None

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
    def scales_shape(self) -> list[int]:
        return [self.outputs, self.groups]

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
    signed: ClassVar[bool] = True
    bits: ClassVar[int] = 4
    has_zeros: ClassVar[bool] = False
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

    @property
    def scales_shape(self) -> list[int]:
        return [self.outputs, self.groups]

    def integers(self, outputs: Range, inputs: Range, device: torch.device) -> Tensor:
        begin, end = outputs
        held = read_part(self.bytes, (begin // 2, -(-end // 2)), inputs, device).view(torch.int8)
        low, high = held << 4 >> 4, held >> 4  # with their signs
        return torch.stack((low, high), dim=1).flatten(0, 1)[begin % 2 :][: end - begin].int()

    def zeros(self, outputs: Range, device: torch.device) -> Tensor:
        return torch.zeros((1, self.groups), dtype=torch.int32, device=device)

    def scales_of(self, outputs: Range, device: torch.device) -> Tensor:
        return _of_outputs(self.scales, outputs, device)


@dataclass(frozen=True, slots=True)
class AwqRows:
    """words [outputs, inputs / 8], scales [outputs, 8 n], zero points [outputs, n], of 4 bits.

    This is AutoAWQ's version for single tokens. n: words that have the zero points of all groups, and more
    of them where groups are small, so that there are scales and zero points of no group.
    """

    inputs_first: ClassVar[bool] = False
    signed: ClassVar[bool] = False
    has_zeros: ClassVar[bool] = True
    bits: ClassVar[int] = _FOUR_BITS.bits

    words: Any
    scales: Any
    zero_points: Any
    group: int  # inputs

    @property
    def outputs(self) -> int:
        return int(self.words.get_shape()[0])

    @property
    def inputs(self) -> int:
        return int(self.words.get_shape()[1]) * WORD // _FOUR_BITS.bits

    @property
    def groups(self) -> int:
        return -(-self.inputs // self.group)

    @property
    def scales_shape(self) -> list[int]:
        outputs, words = self.zeros_shape
        return [outputs, words * WORD // _FOUR_BITS.bits]

    @property
    def zeros_shape(self) -> list[int]:
        step = 1 if self.group >= 128 else -(-128 // self.group)
        return [self.outputs, -(-_FOUR_BITS.count(self.groups) // step) * step]

    def integers(self, outputs: Range, inputs: Range, device: torch.device) -> Tensor:
        return _FOUR_BITS.read(self.words, outputs, inputs, 1, device)

    def zeros(self, outputs: Range, device: torch.device) -> Tensor:
        return _FOUR_BITS.read(self.zero_points, outputs, (0, self.groups), 1, device)

    def scales_of(self, outputs: Range, device: torch.device) -> Tensor:
        return read_part(self.scales, outputs, (0, self.groups), device)


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
