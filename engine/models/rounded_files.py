"""Safetensors files whose weights of layers are read rounded to 8-bit floats, with a scale for each row."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.engine.models.copies import CopiedSlice, Copy
from quire.engine.models.doubts import Doubts
from quire.engine.models.expanded_file import (
    NAMES,
    ExpandedFile,
    ranges_of,
    round_once,
    rows_at_once,
)
from quire.engine.models.layers import PRODUCTS
from quire.engine.parallel.share import Range
from quire.kernels.quantised.weight import Numbers, WeightFormat, expand_numbers, quantise

ROUNDED_FORMAT = WeightFormat("float8", 0, False, torch.float32)
NUMBERS = ("F64", "F32", "F16", "BF16")  # others are refused
_PARTS = "|".join(re.escape(part) for parts in PRODUCTS for part in parts)
_OF_PRODUCTS = re.compile(rf"(?:model\.)?layers\.\d+\.(?:{_PARTS})\.weight")


@dataclass(frozen=True, slots=True)
class RoundedTensor:
    """A matrix of which any part is read as numbers that 8-bit floats stand for.

    Whole rows are read for it: a part's scales are those of the whole. dtype, device: of what is read.
    """

    name: str
    base: Any  # a slice, as safetensors has it
    dtype: torch.dtype
    device: torch.device

    def get_shape(self) -> list[int]:
        shape: list[int] = self.base.get_shape()
        return shape

    def get_dtype(self) -> str:
        return NAMES[self.dtype]

    def on(self, device: torch.device, copy: Copy) -> RoundedTensor:
        """Return the same weight, to be read to a device by `copy`, and rounded there."""
        return replace(self, device=device, base=CopiedSlice(self.base, device, copy))

    @property
    def kept_format(self) -> WeightFormat:
        """Return how it can be kept in 8 bits."""
        return ROUNDED_FORMAT

    def __getitem__(self, index: Any) -> Tensor:
        """Read a range of each dimension. Raises ValueError for numbers that are none, or too large."""
        (first, last), columns = ranges_of(index, self.get_shape())
        shape = last - first, columns[1] - columns[0]
        expanded = torch.empty(shape, dtype=self.dtype, device=self.device)
        if not expanded.numel():
            return expanded
        step = rows_at_once(self.get_shape()[1])
        for begin in range(first, last, step):
            end = min(begin + step, last)
            numbers = expand_numbers(self._rounded((begin, end), columns))
            round_once(expanded[begin - first : end - first], numbers, self.name)
        return expanded

    def numbers(self, outputs: Range, inputs: Range, doubts: Doubts) -> Numbers:
        """Read a part as it can be kept; what it stands for may be refused by `doubts`."""
        numbers = self._rounded(outputs, inputs)
        doubts.note(numbers, self, outputs, inputs, self.dtype)
        return numbers

    def _rounded(self, outputs: Range, inputs: Range) -> Numbers:
        rows = self.base[slice(*outputs)].to(self.device)
        rounded = quantise(rows, ROUNDED_FORMAT)
        return Numbers(rounded.codes[:, slice(*inputs)], rounded.scales)


def round_files(files: list[Any], dtype: torch.dtype, device: torch.device) -> list[ExpandedFile]:
    """Return open files as if they had weights of layers rounded, in a dtype on a device."""
    rounded: dict[str, RoundedTensor] = {}
    for file in files:
        for name in file.offset_keys():
            if _OF_PRODUCTS.fullmatch(name) is None:
                continue
            base = file.get_slice(name)
            if len(base.get_shape()) == 2 and base.get_dtype() in NUMBERS:
                rounded[name] = RoundedTensor(name, base, dtype, device)
    return [ExpandedFile(file, rounded, set()) for file in files]
