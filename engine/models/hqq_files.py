"""Safetensors files with weights as HQQ has them, read as if they had the numbers that those stand for.

HQQ (Badri and Shaji 2023) has a weight [outputs, inputs] as a matrix of integers of other sides: `W_q`, of
which one element holds several, each of another part of the rows, the first in the highest bits. Beside it
are `scale` and `zero`, of each row [rows, 1] or each column [1, columns], and what tells of these: `shape` of
the weight, `packing` of the integers, and others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.engine.models.expanded_file import NAMES, ExpandedFile, ranges_of, round_once, rows_at_once
from quire.engine.models.weight_files import listed

_INTEGERS, _SCALES, _ZEROS, _SHAPE, _PACKING = "W_q", "scale", "zero", "shape", "packing"
_AS_FLOAT = "view_as_float"  # whether the bytes are said to be floats
_OTHERS = (
    "nbits", "group_size", "axis", "unpack_view_dtype", "compute_dtype", "quant_scale", "quant_zero",
    "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
_FLOATS = ("F32", "F16", "BF16")


class Packing(NamedTuple):
    """Of how many bits an integer is, how many an element has, one of each part, and its type's name."""

    bits: int
    parts: int
    kind: str


_PACKINGS = {
    "8bit_u8": Packing(8, 1, "U8"),
    "4bit_u8": Packing(4, 2, "U8"),
    "3bit_32": Packing(3, 10, "I32"),
    "2bit_u8": Packing(2, 4, "U8"),
    "1bit_u8": Packing(1, 8, "U8"),
}


@dataclass(frozen=True, slots=True)
class HqqTensor:
    """A weight [outputs, inputs] of HQQ's, of which any part is read as the numbers that it stands for.

    integers, scales, zeros: slices, as safetensors has them. dtype, device: of what is read.
    """

    name: str
    outputs: int
    inputs: int
    integers: Any
    packing: Packing
    scales: Any
    zeros: Any
    dtype: torch.dtype
    device: torch.device

    def get_shape(self) -> list[int]:
        return [self.outputs, self.inputs]

    def get_dtype(self) -> str:
        return NAMES[self.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        """Read ranges of outputs and inputs. Raises ValueError for numbers that the dtype does not have."""
        (first, last), (begin, end) = ranges_of(index, self.get_shape())
        expanded = torch.empty(last - first, end - begin, dtype=self.dtype, device=self.device)
        step = rows_at_once(self.inputs)
        for row in range(first, last if end > begin else first, step):
            until = min(row + step, last)
            numbers = self._numbers(row * self.inputs, until * self.inputs).view(until - row, self.inputs)
            round_once(expanded[row - first : until - first], numbers[:, begin:end], self.name)
        return expanded

    def _numbers(self, begin: int, end: int) -> Tensor:
        """Return a range of the weight's numbers, output after output."""
        columns = self.integers.get_shape()[1]
        first, last = begin // columns, -(-end // columns)
        zeros, scales = (self._of_rows(each, first, last) for each in (self.zeros, self.scales))
        numbers = (self._rows(first, last).float() - zeros) * scales
        return numbers.flatten()[begin - first * columns :][: end - begin]

    def _rows(self, first: int, last: int) -> Tensor:
        """Return the integers of rows."""
        bits, parts, _ = self.packing
        rows = self.integers.get_shape()[0]  # of one part
        found: list[Tensor] = []
        for part in range(first // rows, -(-last // rows)):
            held = self.integers[max(first - part * rows, 0) : min(last - part * rows, rows), :]
            found.append(held.to(self.device) >> bits * (parts - 1 - part) & (1 << bits) - 1)
        return torch.cat(found)

    def _of_rows(self, held: Any, first: int, last: int) -> Tensor:
        """Return scales or zero points of rows."""
        part: Tensor = held[...] if held.get_shape()[0] == 1 else held[first:last, :]
        return part.to(self.device).float()


def expand_hqq(files: list[Any], dtype: torch.dtype, device: torch.device) -> list[ExpandedFile]:
    """Return the files as if they had the numbers that weights stand for, in a dtype on a device.

    Raises ValueError for weights of which a part is missing or does not fit, by name.
    """
    held = {name: file for file in files for name in file.offset_keys()}
    expanded: dict[str, HqqTensor] = {}
    hidden: set[str] = set()
    renamed: dict[str, str] = {}
    problems: list[str] = []
    for key, file in held.items():
        layer, _, last = key.rpartition(".")
        if last != _INTEGERS:
            continue
        others = (_SCALES, _ZEROS, _SHAPE, _PACKING, _AS_FLOAT, *_OTHERS)
        beside = {
            other: held[name].get_slice(name) for other in others if (name := f"{layer}.{other}") in held
        }
        hidden.update(f"{layer}.{other}" for other in beside)
        renamed[key] = name = f"{layer}.weight"
        try:
            expanded[name] = _tensor(key, file.get_slice(key), beside, dtype, device)
        except ValueError as error:
            problems.append(f"{key}: {error}")
    if problems:
        raise ValueError(f"quantised weights cannot be read: {listed(problems)}")
    return [ExpandedFile(file, expanded, hidden, renamed) for file in files]


def _tensor(
    key: str, integers: Any, beside: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> HqqTensor:
    """Return a weight. Raises ValueError where a part is missing or does not fit."""
    if missing := [name for name in (_SCALES, _ZEROS, _SHAPE, _PACKING) if name not in beside]:
        raise ValueError(f"{' and '.join(missing)} beside it are missing")
    if _AS_FLOAT in beside and bool(beside[_AS_FLOAT][...]):
        raise ValueError(f"{_AS_FLOAT} is set; only integers are read")
    named = "".join(map(chr, beside[_PACKING][...].tolist()))
    if named not in _PACKINGS:
        raise ValueError(f"its {_PACKING} is {named!r}; it may be {', '.join(_PACKINGS)}")
    packing, sides = _PACKINGS[named], beside[_SHAPE][...].tolist()
    kind, shape = integers.get_dtype(), integers.get_shape()
    if len(sides) != 2 or len(shape) != 2 or kind != packing.kind:
        raise ValueError(f"it holds {kind} of shape {shape}, and {_SHAPE} is {sides}")
    (outputs, inputs), (held, columns) = sides, shape
    rows = outputs * inputs // max(columns, 1)
    if rows * columns != outputs * inputs or held != -(-rows // packing.parts):
        raise ValueError(f"it has shape {shape}, which is not of {sides} in {named}")
    for name in (_SCALES, _ZEROS):
        found, of = beside[name].get_dtype(), beside[name].get_shape()
        if of not in ([rows, 1], [1, columns]) or found not in _FLOATS:
            raise ValueError(f"{name} holds {found} of shape {of}, and is of {rows} rows of {columns}")
    return HqqTensor(key, outputs, inputs, integers, packing, beside[_SCALES], beside[_ZEROS], dtype, device)
