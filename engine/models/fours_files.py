"""Safetensors files with weights in NVFP4 or MXFP4, read as if they had the numbers that those stand for.

Of a weight [outputs, inputs] there are bytes [outputs, inputs / 2] of two 4-bit floats each, the lower one
first. Of NVFP4 there is an 8-bit float for 16 numbers each [outputs, inputs / 16], and one number for all of
these, by which compressed-tensors has them divided, and ModelOpt multiplied. ModelOpt may have one for each
input as well, by which that is multiplied before (its AWQ). Of MXFP4, as compressed-tensors has it, there is
an exponent of 2 for 32 numbers each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.engine.models.copies import CopiedSlice, Copy
from quire.engine.models.doubts import Doubts
from quire.engine.models.expanded_file import NAMES, ExpandedFile, ranges_of, round_once, rows_at_once
from quire.engine.models.mxfp4_files import MXFP4_FORMAT, POWERS, codes_of, most_of
from quire.engine.models.weight_files import listed
from quire.engine.parallel.share import Range
from quire.kernels.quantised.weight import FOURS, Numbers, WeightFormat

_OF_ACTIVATIONS = ("input_global_scale", "input_scale")
_BYTES, _FLOATS, _ALL = "U8", "F8_E4M3", "F32"  # as safetensors names them
_FACTORS = ("F32", "F16", "BF16")
_MEANINGS = torch.tensor((*FOURS, *(-each for each in FOURS)))


@dataclass(frozen=True, slots=True)
class Names:
    """What files call the parts of a weight, behind its layer's name.

    divisor, multiplier: of all scales, at most one of the two. factors: of inputs. "": files have none.
    block: numbers that have a scale. kind: of scales, as safetensors names it.
    """

    packed: str
    scales: str
    block: int
    kind: str
    divisor: str = ""
    multiplier: str = ""
    factors: str = ""


OF_COMPRESSED = Names("weight_packed", "weight_scale", 16, _FLOATS, divisor="weight_global_scale")
OF_MXFP4 = Names("weight_packed", "weight_scale", 32, _BYTES)
OF_MODELOPT = Names(
    "weight", "weight_scale", 16, _FLOATS, multiplier="weight_scale_2", factors="pre_quant_scale"
)


@dataclass(frozen=True, slots=True)
class FoursTensor:
    """A weight in NVFP4 or MXFP4, of which any part is read as the numbers that it stands for.

    packed, scales: slices, as safetensors has them. divisor, multiplier: of scales. factors: that inputs are
    multiplied by, or None. dtype, device: of what is read.
    """

    name: str
    packed: Any
    scales: Any
    block: int
    divisor: float
    multiplier: float
    factors: Any
    dtype: torch.dtype
    device: torch.device

    def get_shape(self) -> list[int]:
        outputs, pairs = self.packed.get_shape()
        return [outputs, 2 * pairs]

    def get_dtype(self) -> str:
        return NAMES[self.dtype]

    def on(self, device: torch.device, copy: Copy) -> FoursTensor:
        """Return the same weight, of which what can be kept is read to a device, by `copy`."""
        return replace(self, device=device, packed=CopiedSlice(self.packed, device, copy))

    @property
    def kept_format(self) -> WeightFormat | str:
        """Return how experts can have it in 4 bits, or why they cannot."""
        if self.scales.get_dtype() != _BYTES:
            return "scales that are no powers of two"
        return MXFP4_FORMAT if self.factors is None else "factors of inputs"

    def numbers(self, outputs: Range, inputs: Range, doubts: Doubts) -> Numbers:
        """Read a part as it can be kept, whose inputs begin and end with blocks; there are no doubts."""
        begin, end = inputs
        pairs = self.packed[slice(*outputs), begin // 2 : end // 2].to(self.device)
        scales = self.scales[slice(*outputs), begin // self.block : end // self.block]
        return Numbers(codes_of(pairs), scales.to(self.device), most_exponent=most_of(scales))

    def __getitem__(self, index: Any) -> Tensor:
        """Read ranges of outputs and inputs. Raises ValueError for numbers that the dtype does not have."""
        (first, last), (begin, end) = ranges_of(index, self.get_shape())
        expanded = torch.empty(last - first, end - begin, dtype=self.dtype, device=self.device)
        meanings = _MEANINGS.to(self.device)
        blocks = torch.arange(begin, end, device=self.device) // self.block
        step = rows_at_once(end - begin)
        for row in range(first, last if end > begin else first, step):
            rows = slice(row, min(row + step, last))
            pairs = self.packed[rows, begin // 2 : -(-end // 2)].to(self.device)
            codes = codes_of(pairs)[:, begin % 2 :][:, : end - begin]
            held = self.scales[rows, :]
            held = POWERS[held.int()] if held.dtype == torch.uint8 else held.float()
            scales = held.to(self.device) / self.divisor * self.multiplier
            numbers = meanings[codes.int()] * scales[:, blocks]
            if self.factors is not None:
                numbers *= self.factors[begin:end].to(self.device).float()
            round_once(expanded[rows.start - first : rows.stop - first], numbers, self.name)
        return expanded


def expand_fours(
    files: list[Any], names: Names, dtype: torch.dtype, device: torch.device
) -> list[ExpandedFile]:
    """Return the files as if they had the numbers that weights stand for, in a dtype on a device.

    Raises ValueError for weights of which a part is missing or does not fit, by name.
    """
    held = {name: file for file in files for name in file.offset_keys()}
    expanded: dict[str, FoursTensor] = {}
    hidden: set[str] = set()
    renamed: dict[str, str] = {}
    problems: list[str] = []
    for key, file in held.items():
        layer, _, last = key.rpartition(".")
        if last != names.packed or (last == "weight" and file.get_slice(key).get_dtype() != _BYTES):
            continue
        others = (names.scales, names.divisor, names.multiplier, names.factors, *_OF_ACTIVATIONS)
        beside = {other: held[name] for other in others if (name := f"{layer}.{other}") in held}
        hidden.update(f"{layer}.{other}" for other in beside)
        renamed[key] = name = f"{layer}.weight"
        try:
            expanded[name] = _tensor(key, layer, names, held, dtype, device)
        except ValueError as error:
            problems.append(f"{key}: {error}")
    if problems:
        raise ValueError(f"weights of 4-bit floats cannot be read: {listed(problems)}")
    return [ExpandedFile(file, expanded, hidden, renamed) for file in files]


def _tensor(
    key: str, layer: str, names: Names, held: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> FoursTensor:
    """Return a weight. Raises ValueError where a part is missing or does not fit."""
    of_all = names.divisor or names.multiplier
    wanted = {names.packed: _BYTES, names.scales: names.kind} | ({of_all: _ALL} if of_all else {})
    parts = {part: held[name].get_slice(name) for part in wanted if (name := f"{layer}.{part}") in held}
    if missing := [part for part in wanted if part not in parts]:
        raise ValueError(f"it is there, and {' and '.join(missing)} beside it not")
    kinds = {part: each.get_dtype() for part, each in parts.items()}
    if kinds != wanted:
        raise ValueError(f"its parts hold {kinds}, not {wanted}")
    (*shape, pairs), scales = parts[names.packed].get_shape(), parts[names.scales].get_shape()
    inputs = 2 * pairs
    if len(shape) != 1 or inputs % names.block or scales != [*shape, inputs // names.block]:
        raise ValueError(f"it has shape {[*shape, pairs]}, and {names.scales} {scales}")
    factors, name = None, f"{layer}.{names.factors}"
    if names.factors and name in held:
        factors = held[name].get_slice(name)
        if factors.get_shape() != [inputs] or factors.get_dtype() not in _FACTORS:
            told = f"{factors.get_dtype()} of shape {factors.get_shape()}"
            raise ValueError(f"{names.factors} holds {told}, and there are {inputs} inputs")
    one = _number(held, f"{layer}.{of_all}") if of_all else 1.0
    divisor, multiplier = (one, 1.0) if names.divisor else (1.0, one)
    return FoursTensor(
        key,
        parts[names.packed],
        parts[names.scales],
        names.block,
        divisor,
        multiplier,
        factors,
        dtype,
        device,
    )


def _number(held: dict[str, Any], name: str) -> float:
    number: Tensor = held[name].get_tensor(name)
    if number.shape not in ((), (1,)):
        raise ValueError(f"{name} has shape {[*number.shape]}; it must be one number")
    return float(number)
