"""Safetensors files with weights of 8-bit floats, read as if they had the numbers that those stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.engine.models.copies import CopiedSlice, Copy
from quire.engine.models.doubts import Doubts
from quire.engine.models.expanded_file import (
    DTYPES,
    NAMES,
    ExpandedFile,
    ranges_of,
    round_once,
    rows_at_once,
)
from quire.engine.models.float8 import Block, Float8
from quire.engine.models.mxfp4_files import POWERS
from quire.engine.models.weight_files import listed
from quire.engine.parallel.share import Range
from quire.kernels.quantised.weight import Numbers, WeightFormat

FLOAT8 = "F8_E4M3"  # as safetensors names torch.float8_e4m3fn
_SCALES = ("_scale_inv", "_scale")  # behind a weight's name; both are of what it is multiplied by
_SCALE_TYPES, _POWERS = ("F32", "F16", "BF16"), ("U8",)
_OF_ACTIVATIONS = ("input_scale", "input_scale_ub", "activation_scale")
STACKS = "stacks of matrices"  # why a weight cannot be kept


@dataclass(frozen=True, slots=True)
class Float8Tensor:
    """A weight of 8-bit floats, of which any part is read as the numbers that it stands for.

    block: what one of its scales is of. dtype, device: of what is read.
    """

    name: str
    floats: Any  # a slice, as safetensors has it
    scales: Any
    block: Block
    dtype: torch.dtype
    device: torch.device

    def get_shape(self) -> list[int]:
        shape: list[int] = self.floats.get_shape()
        return shape

    def get_dtype(self) -> str:
        return NAMES[self.dtype]

    def on(self, device: torch.device, copy: Copy) -> Float8Tensor:
        """Return the same weight, to be read to a device by `copy`."""
        return replace(
            self,
            device=device,
            floats=CopiedSlice(self.floats, device, copy),
            scales=CopiedSlice(self.scales, device, copy),
        )

    def __getitem__(self, index: Any) -> Tensor:
        """Read a range of each dimension. Raises ValueError for numbers that are none, or too large."""
        ranges = ranges_of(index, self.get_shape())
        floats = self.floats[tuple(slice(*each) for each in ranges)].to(self.device)
        scales = self._scales()
        for dim, (begin, end) in enumerate(ranges[:-2]):
            scales = scales.narrow(dim, begin, end - begin)
        expanded = torch.empty(floats.shape, dtype=self.dtype, device=self.device)
        (row, _), (column, _) = ranges[-2:]
        parts = zip(_matrices(scales), _matrices(floats), _matrices(expanded), strict=True)
        for part in parts:
            self._expand(*part, row, column)
        return expanded

    @property
    def kept_format(self) -> WeightFormat | str:
        """Return how it can be kept in 8 bits, or why it cannot."""
        columns, kind = self.get_shape()[-1], self.scales.get_dtype()
        if len(self.get_shape()) != 2:
            return STACKS
        if kind in _POWERS:
            return "scales that are powers of two"
        group = self.block.columns if self.block.columns < columns else 0
        return WeightFormat("float8", group, False, DTYPES[kind])

    def numbers(self, outputs: Range, inputs: Range, doubts: Doubts) -> Numbers:
        """Read a part of a matrix as it can be kept; what it stands for may be refused by `doubts`."""
        floats = self.floats[slice(*outputs), slice(*inputs)].to(self.device)
        of_rows = torch.arange(*outputs, device=self.device) // self.block.rows
        groups = slice(inputs[0] // self.block.columns, -(-inputs[1] // self.block.columns))
        scales = self._scales()[of_rows, groups].to(DTYPES[self.scales.get_dtype()])
        numbers = Numbers(floats, scales)
        doubts.note(numbers, self, outputs, inputs, self.dtype)
        return numbers

    def _scales(self) -> Tensor:
        """Return the scales of all blocks, [..., blocks of rows, blocks of columns]."""
        *stack, rows, columns = self.get_shape()
        blocks = -(-rows // self.block.rows), -(-columns // self.block.columns)
        scales: Tensor = self.scales[...]
        if scales.dtype == torch.uint8:
            scales = POWERS.to(scales.device)[scales.int()]
        return scales.to(self.device, torch.float32).view(*stack, *blocks)

    def _expand(self, scales: Tensor, floats: Tensor, expanded: Tensor, row: int, column: int) -> None:
        """Expand a part of a matrix that begins at that row and column. A little at a time is in fp32."""
        rows, columns = floats.shape
        of_columns = torch.arange(column, column + columns, device=self.device) // self.block.columns
        of_rows = torch.arange(row, row + rows, device=self.device) // self.block.rows
        factors = scales[:, of_columns] if scales.shape[1] > 1 else scales
        step = rows_at_once(columns)
        for begin in range(0, rows, step):
            piece = slice(begin, begin + step)
            numbers = floats[piece].float()
            numbers *= factors[of_rows[piece]] if len(factors) > 1 else factors
            if not numbers.numel():
                continue
            round_once(expanded[piece], numbers, self.name)


def expand_float8(
    files: list[Any], float8: Float8, dtype: torch.dtype, device: torch.device
) -> list[ExpandedFile]:
    """Return the files as if they had the numbers that weights stand for, in a dtype on a device.

    Of scales only headers are read. Raises ValueError for weights without scales, with scales of another
    shape than config.json says, and of other 8-bit floats, by name.
    """
    held = {name: file for file in files for name in file.offset_keys()}
    expanded: dict[str, Float8Tensor] = {}
    hidden: set[str] = set()
    problems: list[str] = []
    kinds = _POWERS if float8.powers else _SCALE_TYPES
    for name, file in held.items():
        floats = file.get_slice(name)
        if floats.get_dtype() != FLOAT8:
            continue
        names = [name + suffix for suffix in _SCALES]
        found = [each for each in names if each in held]
        if len(found) != 1:
            wanted = f"both {' and '.join(names)} are" if found else f"neither {' nor '.join(names)} is"
            problems.append(f"{name} is of 8-bit floats, and {wanted} there")
            continue
        scales = held[found[0]].get_slice(found[0])
        block = float8.block_of(floats.get_shape(), scales.get_shape())
        hidden.update(found, _of_activations(name) & held.keys())
        if block is None:
            problems.append(
                f"{found[0]} has shape {scales.get_shape()}, which quantization_config does not have for "
                f"weights of {floats.get_shape()}"
            )
        elif scales.get_dtype() not in kinds:
            problems.append(f"{found[0]} holds {scales.get_dtype()}; scales may be {', '.join(kinds)}")
        else:
            expanded[name] = Float8Tensor(name, floats, scales, block, dtype, device)
    for name in held.keys() - hidden:
        kind = held[name].get_slice(name).get_dtype()
        if kind.startswith("F8_") and kind != FLOAT8:
            problems.append(f"{name} holds {kind}; 8-bit floats may be {FLOAT8}")
    if problems:
        raise ValueError(f"quantised weights cannot be read: {listed(problems)}")
    return [ExpandedFile(file, expanded, hidden) for file in files]


def _of_activations(weight: str) -> set[str]:
    """Return names of scales of what a weight is multiplied by, which stays as it is."""
    before = weight.removesuffix("weight") if weight.endswith(".weight") else f"{weight}_"
    return {before + name for name in _OF_ACTIVATIONS}


def _matrices(stack: Tensor) -> Iterator[Tensor]:
    """Return the matrices of a tensor whose last dimensions they are."""
    return iter(stack.flatten(0, -3)) if stack.dim() > 2 else iter((stack,))
