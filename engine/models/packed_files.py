"""Safetensors files with weights of packed integers, read as if they had the numbers that those stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
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
from quire.engine.models.packed import Form, Packed
from quire.engine.models.packed_layouts import Awq, Gptq, Layout
from quire.engine.models.packed_rows import AwqRows, CompressedBytes, CompressedWords, PairsOfOutputs
from quire.engine.models.packed_words import WORD, Range, Whole, Words, words_of
from quire.engine.models.weight_files import listed
from quire.kernels.quantised.weight import Numbers, WeightFormat

_WORDS, _BYTES, _PAIRS = "I32", "I8", "U8"  # as safetensors names them
_SCALES = ("F32", "F16", "BF16")
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
_UNWRITTEN = -1  # a group: inputs stand beside each other


@dataclass(frozen=True, slots=True)
class Parts:
    """What files call the parts of a weight, behind its layer's name.

    places: each input's group, where inputs of a group do not stand beside each other (GPTQ's act order,
    Frantar et al. 2022). factors: what inputs are multiplied by before (ModelOpt's AWQ). "": files have none.
    """

    integers: tuple[str, ...]
    scales: str
    zero_points: str = ""
    places: str = ""
    factors: str = ""


_OF_GPTQ = Parts(("qweight",), "scales", "qzeros", "g_idx")
_PARTS: dict[Form, Parts] = {
    "gptq": _OF_GPTQ,
    "gptq_v2": _OF_GPTQ,
    "awq": _OF_GPTQ,
    "awq_rows": _OF_GPTQ,
    "compressed": Parts(("weight_packed", "weight"), "weight_scale", "weight_zero_point", "weight_g_idx"),
    "modelopt": Parts(("weight",), "weight_scale", factors="pre_quant_scale"),
}
_SHAPE = "weight_shape"  # [outputs, inputs] of words of compressed-tensors


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A weight [outputs, inputs] of integers, of which any part is read as the numbers that it stands for.

    group: inputs that have a scale, unless `places` tells. factors: that inputs are multiplied by, or None.
    dtype, device: of what is read.
    """

    name: str
    layout: Layout
    group: int
    places: Any
    factors: Any
    dtype: torch.dtype
    device: torch.device

    def get_shape(self) -> list[int]:
        return [self.layout.outputs, self.layout.inputs]

    def get_dtype(self) -> str:
        return NAMES[self.dtype]

    def on(self, device: torch.device, copy: Copy) -> PackedTensor:
        """Return the same weight, to be read to a device by `copy`."""
        layout: Any = self.layout  # a dataclass, whichever
        parts = {each.name: getattr(layout, each.name) for each in fields(layout)}
        copied = {
            name: CopiedSlice(part, device, copy)
            for name, part in parts.items()
            if hasattr(part, "get_shape")
        }
        return replace(self, device=device, layout=replace(layout, **copied))

    def __getitem__(self, index: Any) -> Tensor:
        """Read ranges of outputs and inputs. Raises ValueError for numbers that the dtype does not have."""
        outputs, inputs = ranges_of(index, self.get_shape())
        shape = outputs[1] - outputs[0], inputs[1] - inputs[0]
        expanded = torch.empty(shape, dtype=self.dtype, device=self.device)
        if not expanded.numel():
            return expanded
        groups = self._groups()[slice(*inputs)]
        zeros = self.layout.zeros(outputs, self.device)
        scales = self.layout.scales_of(outputs, self.device).float()
        of_inputs = self.layout.inputs_first
        stored, (first, last) = (expanded.T, inputs) if of_inputs else (expanded, outputs)
        step = max(rows_at_once(stored.shape[1]), WORD)
        for begin in range(0, len(stored), step):
            piece = slice(begin, begin + step)
            some = first + begin, min(first + begin + step, last)
            if of_inputs:
                integers = self.layout.integers(outputs, some, self.device)
                numbers = (integers - zeros[groups[piece]]).float() * scales[groups[piece]]
            else:
                integers = self.layout.integers(some, inputs, self.device)
                own, factors = (each if len(each) == 1 else each[piece] for each in (zeros, scales))
                numbers = (integers - own[:, groups]).float() * factors[:, groups]
                if self.factors is not None:
                    numbers *= self.factors[slice(*inputs)].to(self.device).float()
            round_once(stored[piece], numbers, self.name)
        return expanded

    @property
    def kept_format(self) -> WeightFormat | str:
        """Return how it can be kept in 4 bits, or why it cannot. Reads which groups inputs are in."""
        layout = self.layout
        if layout.bits != 4:
            return f"{layout.bits} bits"
        if self.factors is not None:
            return "factors of inputs"
        if self.places is not None and not torch.equal(self._groups(), self._groups_beside()):
            return "act order"
        group = 0 if layout.groups == 1 else self.group
        return WeightFormat("int4", group, layout.has_zeros, DTYPES[layout.scales.get_dtype()])

    def numbers(self, outputs: Range, inputs: Range, doubts: Doubts) -> Numbers:
        """Read a part as it can be kept; what it stands for may be refused by `doubts`."""
        layout, rows = self.layout, outputs[1] - outputs[0]
        groups = slice(inputs[0] // self.group, -(-inputs[1] // self.group))
        lifted = 8 if layout.signed else 0
        codes = layout.integers(outputs, inputs, self.device) + lifted
        zeros = layout.zeros(outputs, self.device) + lifted
        scales = layout.scales_of(outputs, self.device)
        if layout.inputs_first:
            codes, zeros, scales = codes.T, zeros.T, scales.T
        zeros, scales = (each[:, groups].expand(rows, -1) for each in (zeros, scales))
        numbers = Numbers(codes.to(torch.uint8), scales, zeros.to(torch.uint8) if layout.has_zeros else None)
        doubts.note(numbers, self, outputs, inputs, self.dtype)
        return numbers

    def _groups(self) -> Tensor:
        """Return each input's group. Raises ValueError if one has no scale."""
        count = self.layout.groups
        if self.places is not None:
            groups: Tensor = self.places[...].to(self.device).int()
            least, most = torch.stack(groups.aminmax()).tolist()
            if 0 <= least <= most < count:
                return groups
            if not least == most == _UNWRITTEN:
                raise ValueError(
                    f"{self.name}: inputs are in groups {least} to {most}, and scales are of {count}"
                )
        return self._groups_beside()

    def _groups_beside(self) -> Tensor:
        """Return each input's group where those of a group stand beside each other."""
        return torch.arange(self.layout.inputs, dtype=torch.int32, device=self.device) // self.group


def expand_packed(
    files: list[Any], packed: Packed, dtype: torch.dtype, device: torch.device
) -> list[ExpandedFile]:
    """Return the files as if they had the numbers that weights stand for, in a dtype on a device.

    Of scales and zero points only headers are read. Raises ValueError for weights of which a part is missing,
    or has a shape that quantization_config does not have, by name.
    """
    held = {name: file for file in files for name in file.offset_keys()}
    names = _PARTS[packed.form]
    expanded: dict[str, PackedTensor] = {}
    hidden: set[str] = set()
    renamed: dict[str, str] = {}
    problems: list[str] = []
    for key, file in held.items():
        layer, _, last = key.rpartition(".")
        kind = file.get_slice(key).get_dtype()
        if last not in names.integers or (last == "weight" and kind not in (_BYTES, _PAIRS)):
            continue
        others = [names.scales, names.zero_points, names.places, names.factors, _SHAPE, *_OF_ACTIVATIONS]
        beside = {
            other: held[name].get_slice(name) for other in others if (name := f"{layer}.{other}") in held
        }
        hidden.update(f"{layer}.{other}" for other in beside)
        renamed[key] = name = f"{layer}.weight"
        try:
            layout = _layout(packed, file.get_slice(key), beside, of_bytes=last == "weight")
            group = _check(packed, names, layout, beside)
        except ValueError as error:
            problems.append(f"{key}: {error}")
            continue
        places, factors = beside.get(names.places), beside.get(names.factors)
        expanded[name] = PackedTensor(key, layout, group, places, factors, dtype, device)
    if problems:
        raise ValueError(f"quantised weights cannot be read: {listed(problems)}")
    return [ExpandedFile(file, expanded, hidden, renamed) for file in files]


def _layout(packed: Packed, integers: Any, beside: Mapping[str, Any], *, of_bytes: bool) -> Layout:
    """Return how a weight's parts are held. Raises ValueError where one is missing or of another kind."""
    names = _PARTS[packed.form]
    wanted = [names.scales]
    if packed.zero_points:
        wanted.append(names.zero_points)
    if packed.form == "compressed" and not of_bytes:
        wanted.append(_SHAPE)
    if missing := [name for name in wanted if name not in beside]:
        raise ValueError(f"{' and '.join(missing)} beside it are missing")
    kind, shape = integers.get_dtype(), integers.get_shape()
    pairs = packed.form == "modelopt" and packed.bits == (4,)
    wanted_kind = _PAIRS if pairs else _BYTES if of_bytes else _WORDS
    if len(shape) != 2 or kind != wanted_kind:
        raise ValueError(f"it holds {kind} of shape {shape}, not a matrix of {wanted_kind}")
    scales, zero_points = beside[names.scales], beside.get(names.zero_points)
    if scales.get_dtype() not in _SCALES:
        raise ValueError(f"{names.scales} hold {scales.get_dtype()}; they may be {', '.join(_SCALES)}")
    if pairs:
        return PairsOfOutputs(integers, scales)
    if of_bytes:
        return CompressedBytes(integers, scales, zero_points)
    if zero_points is not None and zero_points.get_dtype() != _WORDS:
        raise ValueError(f"{names.zero_points} hold {zero_points.get_dtype()}, not {_WORDS}")
    if packed.form == "awq":
        return Awq(integers, scales, zero_points)
    if packed.form == "awq_rows":
        inputs = int(shape[1]) * WORD // packed.bits[0]
        return AwqRows(integers, scales, zero_points, packed.groups[0] or inputs)
    if packed.form == "compressed":
        outputs, inputs = (int(size) for size in beside[_SHAPE][...].tolist())
        packings = _packings(packed.bits, inputs, shape[1])
        if len(packings) != 1 or outputs != shape[0]:
            told = "may be more than one kind" if len(packings) > 1 else "are not"
            raise ValueError(f"words of shape {shape} {told} of [{outputs}, {inputs}] integers")
        return CompressedWords(integers, scales, zero_points, packings[0], inputs)
    less = 1 if packed.form == "gptq" else 0
    layouts = [Gptq(integers, scales, zero_points, bits, zeros_less=less) for bits in packed.bits]
    fits = [each for each in layouts if beside[names.zero_points].get_shape() == each.zeros_shape]
    return (fits or layouts)[0]


def _packings(bits: tuple[int, ...], inputs: int, words: int) -> list[Words]:
    """Return in which ways a row of so many words has the inputs.

    Where they do not fill a word compressed-tensors once left bits over in each, and now leaves none.
    """
    found = {each for some in bits for each in (words_of(some), Whole(some))}
    return [each for each in found if each.count(inputs) == words]


def _check(packed: Packed, names: Parts, layout: Layout, beside: Mapping[str, Any]) -> int:
    """Return how many inputs a group has. Raises ValueError where shapes do not fit each other."""
    outputs, inputs, groups = layout.outputs, layout.inputs, layout.groups
    scales, given = beside[names.scales].get_shape(), f"a weight of [{outputs}, {inputs}]"
    whole = packed.form in ("compressed", "modelopt") and scales in ([], [1], [1, 1], [outputs], [outputs, 1])
    if not whole and scales != layout.scales_shape:
        raise ValueError(f"{names.scales} have shape {scales}, and are of {given}")
    size = inputs if whole else packed.group_of(inputs, groups)
    places = beside.get(names.places)
    if places is not None and places.get_shape() != [inputs]:
        raise ValueError(f"{names.places} has shape {places.get_shape()}, and is of {given}")
    factors = beside.get(names.factors)
    if factors is not None and factors.get_shape() != [inputs]:
        raise ValueError(f"{names.factors} has shape {factors.get_shape()}, and is of {given}")
    if size is None:
        raise ValueError(
            f"{names.scales} have {groups} groups of {inputs} inputs, and quantization_config has "
            f"{' or '.join(f'groups of {each}' if each else 'one for all' for each in packed.groups)}"
        )
    if names.zero_points in beside:
        zeros, shape = beside[names.zero_points].get_shape(), layout.zeros_shape
        if zeros != shape:
            raise ValueError(f"{names.zero_points} have shape {zeros}, which should be {shape}")
    return size
