"""Safetensors files with weights in MXFP4, read as if they had the numbers that those stand for.

As gpt-oss has them: of a weight [E, inputs, outputs] there are `_blocks` [E, outputs, n, 16], bytes of two
4-bit floats each, the lower one first, and `_scales` [E, outputs, n], exponents of 2 for 32 numbers each
(OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.engine.models.copies import Copy
from quire.engine.models.doubts import Doubts
from quire.engine.models.expanded_file import NAMES, ranges_of
from quire.engine.models.weight_files import listed
from quire.engine.parallel.share import Range
from quire.kernels.quantised.weight import BIAS, FOURS, Numbers, WeightFormat

IN_A_BLOCK = 32
_BLOCKS, _SCALES, _BYTES = "_blocks", "_scales", "U8"
POWERS = torch.tensor([2.0 ** (scale - BIAS) for scale in range(256)])  # by a byte; the last is none
MXFP4_FORMAT = WeightFormat("float4", IN_A_BLOCK, False, torch.uint8)


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """A weight in MXFP4, of which any part is read as the numbers that it stands for.

    blocks, scales: slices, as safetensors has them. dtype: of what is read.
    """

    name: str
    blocks: Any
    scales: Any
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        *stack, outputs, blocks = self.scales.get_shape()
        return [*stack, blocks * IN_A_BLOCK, outputs]

    def get_dtype(self) -> str:
        return NAMES[self.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        """Read a range of each dimension. Raises ValueError for numbers that the dtype does not have."""
        *stack, (first, end), outputs = ranges_of(index, self.get_shape())
        begin = first // IN_A_BLOCK
        read = (*(slice(*each) for each in (*stack, outputs)), slice(begin, -(-end // IN_A_BLOCK)))
        blocks, scales = self.blocks[read], self.scales[read]
        expanded = torch.empty(math.prod(blocks.shape[:-3]), end - first, blocks.shape[-3], dtype=self.dtype)
        first -= begin * IN_A_BLOCK
        if not expanded.numel():
            return expanded.view(*blocks.shape[:-3], *expanded.shape[1:])
        # A power of two times a number of two digits is exact in bf16, but fp16 has not all powers.
        held = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        pairs, powers = _pairs(held), POWERS.to(held)
        for whole, some, exponents in zip(
            expanded, blocks.flatten(0, -4), scales.flatten(0, -3), strict=True
        ):  # one matrix after the other: in fp32 all of them would be large
            numbers = (
                pairs.index_select(0, some.flatten().int()).view(held).view(*exponents.shape, IN_A_BLOCK)
            )
            numbers *= powers.index_select(0, exponents.flatten().int()).view_as(exponents)[..., None]
            if max(FOURS) * 2.0 ** (int(exponents.max()) - BIAS) > torch.finfo(self.dtype).max:
                self._refuse_infinite(numbers)
            whole.copy_(numbers.flatten(1)[:, first : first + len(whole)].T)
        return expanded.view(*blocks.shape[:-3], *expanded.shape[1:])

    def _refuse_infinite(self, numbers: Tensor) -> None:
        if not numbers.to(self.dtype).isfinite().all():
            raise ValueError(f"{self.name} stands for numbers that are not finite in {self.dtype}")


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """One matrix [outputs, inputs] of a stack in MXFP4, of which any part is read as it can be kept.

    device, copy: where it is read to, and by what.
    """

    stack: Mxfp4Tensor
    place: int
    device: torch.device
    copy: Copy

    def get_shape(self) -> list[int]:
        inputs, outputs = self.stack.get_shape()[-2:]
        return [outputs, inputs]

    @property
    def kept_format(self) -> WeightFormat:
        return MXFP4_FORMAT

    def numbers(self, outputs: Range, inputs: Range, doubts: Doubts) -> Numbers:
        """Read a part as it can be kept, whose inputs begin and end with blocks; there are no doubts."""
        begin, end = (each // IN_A_BLOCK for each in inputs)
        part = slice(self.place, self.place + 1), slice(*outputs), slice(begin, end)
        scales = self.stack.scales[part][0]
        codes = codes_of(self._read(self.stack.blocks[part][0]))
        return Numbers(codes, self._read(scales), most_exponent=most_of(scales))

    def _read(self, mapped: Tensor) -> Tensor:
        place = torch.empty(mapped.shape, dtype=mapped.dtype, device=self.device)
        self.copy(place, mapped)
        return place


def most_of(exponents: Tensor) -> int:
    """Return the largest of exponents on a CPU."""
    return int(exponents.max()) if exponents.numel() else 0


def codes_of(pairs: Tensor) -> Tensor:
    """Return the codes of bytes [outputs, ...], the lower four bits first: [outputs, inputs]."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


def expand_mxfp4(slices: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the tensors of files by name, those in MXFP4 as one of a dtype each. Only headers are read.

    Raises ValueError for blocks and scales that do not fit, by name.
    """
    found = dict(slices)
    problems: list[str] = []
    for key in [name for name in slices if name.endswith(_BLOCKS)]:
        name = key.removesuffix(_BLOCKS)
        blocks, scales = found.pop(key), found.pop(name + _SCALES, None)
        if scales is None:
            problems.append(f"{key} is there, and {name + _SCALES} is not")
        elif {blocks.get_dtype(), scales.get_dtype()} != {_BYTES}:
            problems.append(
                f"{key} and its scales hold {blocks.get_dtype()} and {scales.get_dtype()}, not bytes"
            )
        elif len(scales.get_shape()) != 3 or blocks.get_shape() != [*scales.get_shape(), IN_A_BLOCK // 2]:
            problems.append(f"{key} has shape {blocks.get_shape()}, and its scales {scales.get_shape()}")
        else:
            found[name] = Mxfp4Tensor(name, blocks, scales, dtype)
    if problems:
        raise ValueError(f"weights in MXFP4 cannot be read: {listed(problems)}")
    return found


def _pairs(dtype: torch.dtype) -> Tensor:
    """Return the two numbers of each byte as one integer [256] that has the bits of both."""
    numbers = torch.tensor((*FOURS, *(-each for each in FOURS)), dtype=dtype)
    byte = torch.arange(256)
    pairs = torch.stack((numbers[byte & 15], numbers[byte >> 4]), dim=1)
    return pairs.view(torch.int32 if dtype.itemsize == 2 else torch.int64).flatten()
