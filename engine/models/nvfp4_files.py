"""Safetensors files with weights in NVFP4, read as if they had the numbers that those stand for.

As compressed-tensors has them: of a weight [outputs, inputs] there are `weight_packed` [outputs, inputs / 2],
bytes of two 4-bit floats each, the lower one first; `weight_scale` [outputs, inputs / 16], an 8-bit float for
16 numbers each; and `weight_global_scale` [1], by which all of these are divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.engine.models.expanded_file import NAMES, ExpandedFile, ranges_of, round_once, rows_at_once
from quire.engine.models.mxfp4_files import FOURS
from quire.engine.models.weight_files import listed

IN_A_BLOCK = 16
_PACKED, _SCALES, _GLOBAL = "weight_packed", "weight_scale", "weight_global_scale"
_OF_ACTIVATIONS = ("input_global_scale", "input_scale")
_KINDS = {_PACKED: "U8", _SCALES: "F8_E4M3", _GLOBAL: "F32"}  # as safetensors names them
_MEANINGS = torch.tensor((*FOURS, *(-each for each in FOURS)))


@dataclass(frozen=True, slots=True)
class Nvfp4Tensor:
    """A weight in NVFP4, of which any part is read as the numbers that it stands for.

    packed, scales: slices, as safetensors has them. dtype, device: of what is read.
    """

    name: str
    packed: Any
    scales: Any
    divisor: float
    dtype: torch.dtype
    device: torch.device

    def get_shape(self) -> list[int]:
        outputs, pairs = self.packed.get_shape()
        return [outputs, 2 * pairs]

    def get_dtype(self) -> str:
        return NAMES[self.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        """Read ranges of outputs and inputs. Raises ValueError for numbers that the dtype does not have."""
        (first, last), (begin, end) = ranges_of(index, self.get_shape())
        expanded = torch.empty(last - first, end - begin, dtype=self.dtype, device=self.device)
        meanings = _MEANINGS.to(self.device)
        blocks = torch.arange(begin, end, device=self.device) // IN_A_BLOCK
        step = rows_at_once(end - begin)
        for row in range(first, last if end > begin else first, step):
            rows = slice(row, min(row + step, last))
            pairs = self.packed[rows, begin // 2 : -(-end // 2)].to(self.device)
            codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)[:, begin % 2 :][:, : end - begin]
            scales = self.scales[rows, :].to(self.device).float() / self.divisor
            numbers = meanings[codes.int()] * scales[:, blocks]
            round_once(expanded[rows.start - first : rows.stop - first], numbers, self.name)
        return expanded


def expand_nvfp4(files: list[Any], dtype: torch.dtype, device: torch.device) -> list[ExpandedFile]:
    """Return the files as if they had the numbers that weights stand for, in a dtype on a device.

    Raises ValueError for weights of which a part is missing or does not fit, by name.
    """
    held = {name: file for file in files for name in file.offset_keys()}
    expanded: dict[str, Nvfp4Tensor] = {}
    hidden: set[str] = set()
    renamed: dict[str, str] = {}
    problems: list[str] = []
    for key in held:
        layer, _, last = key.rpartition(".")
        if last != _PACKED:
            continue
        names = {part: f"{layer}.{part}" for part in _KINDS}
        beside = [names[_SCALES], names[_GLOBAL], *(f"{layer}.{each}" for each in _OF_ACTIVATIONS)]
        hidden.update(name for name in beside if name in held)
        renamed[key] = f"{layer}.weight"
        if missing := [part for part, name in names.items() if name not in held]:
            problems.append(f"{key} is there, and {' and '.join(missing)} beside it not")
            continue
        parts = {part: held[name].get_slice(name) for part, name in names.items()}
        kinds = {part: each.get_dtype() for part, each in parts.items()}
        (*shape, pairs), scales = parts[_PACKED].get_shape(), parts[_SCALES].get_shape()
        if kinds != _KINDS:
            problems.append(f"{key}: its parts hold {kinds}, not {_KINDS}")
        elif len(shape) != 1 or 2 * pairs % IN_A_BLOCK or scales != [*shape, 2 * pairs // IN_A_BLOCK]:
            problems.append(f"{key} has shape {[*shape, pairs]}, and {_SCALES} {scales}")
        else:
            divisor = float(held[names[_GLOBAL]].get_tensor(names[_GLOBAL]))
            expanded[renamed[key]] = Nvfp4Tensor(key, parts[_PACKED], parts[_SCALES], divisor, dtype, device)
    if problems:
        raise ValueError(f"weights in NVFP4 cannot be read: {listed(problems)}")
    return [ExpandedFile(file, expanded, hidden, renamed) for file in files]
