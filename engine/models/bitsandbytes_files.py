"""Safetensors files with weights as bitsandbytes has them, read as if they had the numbers those stand for.

Of 4 bits (QLoRA, Dettmers et al. 2023): bytes [n / 2, 1] of two codes each, the higher bits first, of a
matrix row after row. Beside `weight` there are `weight.quant_map` [16], what a code means; `weight.absmax`, a
scale of each block of codes; and `weight.quant_state.bitsandbytes__nf4` or `__fp4`, JSON of shape and sizes.
Scales may be codes themselves, of `weight.nested_quant_map` [256], in blocks with scales
`weight.nested_absmax`. Of 8 bits (LLM.int8, Dettmers et al. 2022): bytes with a sign [outputs, inputs], and
beside them `SCB` [outputs], the largest of each row, which 127 stands for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.engine.models.expanded_file import (
    NAMES,
    ExpandedFile,
    ExpandedTensor,
    ranges_of,
    round_once,
    rows_at_once,
)
from quire.engine.models.weight_files import listed

_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")  # behind a weight's name
_MAP, _SCALES = ".quant_map", ".absmax"
_NESTED_MAP, _NESTED_SCALES = ".nested_quant_map", ".nested_absmax"
_ROWS, _FORMAT = "SCB", "weight_format"  # behind a layer's
_LARGEST = 127  # of 8 bits
_CODES, _BYTES = "U8", "I8"  # as safetensors names them


@dataclass(frozen=True, slots=True)
class _State:
    """What JSON beside a weight tells. nested_block: scales that have a scale; 0: they are no codes."""

    outputs: int
    inputs: int
    block: int
    nested_block: int
    nested_offset: float


@dataclass(frozen=True, slots=True)
class FourBits:
    """A weight [outputs, inputs] of 4-bit codes, of which any part is read as the numbers that it stands for.

    codes: a slice, as safetensors has it. meanings [16], scales [blocks] in fp32. dtype, device: of what is
    read.
    """

    name: str
    state: _State
    codes: Any
    meanings: Tensor
    scales: Tensor
    dtype: torch.dtype
    device: torch.device

    def get_shape(self) -> list[int]:
        return [self.state.outputs, self.state.inputs]

    def get_dtype(self) -> str:
        return NAMES[self.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        """Read ranges of outputs and inputs. Raises ValueError for numbers that the dtype does not have."""
        (first, last), (begin, end) = ranges_of(index, self.get_shape())
        inputs = self.state.inputs
        expanded = torch.empty(last - first, end - begin, dtype=self.dtype, device=self.device)
        step = rows_at_once(inputs)
        for row in range(first, last if end > begin else first, step):
            rows = min(step, last - row)
            numbers = self._numbers(row * inputs, (row + rows) * inputs).view(rows, inputs)[:, begin:end]
            round_once(expanded[row - first : row - first + rows], numbers, self.name)
        return expanded

    def _numbers(self, begin: int, end: int) -> Tensor:
        """Return the numbers of a range of codes."""
        held: Tensor = self.codes[begin // 2 : -(-end // 2)]
        pairs = held.to(self.device).flatten()
        codes = torch.stack((pairs >> 4, pairs & 15), dim=1).flatten()[begin % 2 :][: end - begin]
        blocks = torch.arange(begin, end, device=self.device) // self.state.block
        return self.meanings.to(self.device)[codes.int()] * self.scales.to(self.device)[blocks]


@dataclass(frozen=True, slots=True)
class EightBits:
    """A weight [outputs, inputs] of 8-bit integers, of which any part is read as the numbers of a dtype."""

    name: str
    integers: Any
    largest: Any
    dtype: torch.dtype
    device: torch.device

    def get_shape(self) -> list[int]:
        shape: list[int] = self.integers.get_shape()
        return shape

    def get_dtype(self) -> str:
        return NAMES[self.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        """Read ranges of outputs and inputs. Raises ValueError for numbers that the dtype does not have."""
        rows, columns = (slice(*each) for each in ranges_of(index, self.get_shape()))
        integers = self.integers[rows, columns].to(self.device)
        scales = self.largest[rows].to(self.device).float()[:, None] / _LARGEST
        expanded = torch.empty(integers.shape, dtype=self.dtype, device=self.device)
        step = rows_at_once(integers.shape[1])
        for begin in range(0, len(integers) if integers.numel() else 0, step):
            piece = slice(begin, begin + step)
            round_once(expanded[piece], integers[piece].float() * scales[piece], self.name)
        return expanded


def expand_bitsandbytes(files: list[Any], dtype: torch.dtype, device: torch.device) -> list[ExpandedFile]:
    """Return the files as if they had the numbers that weights stand for, in a dtype on a device.

    Raises ValueError for weights of which a part is missing or does not fit, by name.
    """
    held = {name: file for file in files for name in file.offset_keys()}
    expanded: dict[str, ExpandedTensor] = {}
    hidden: set[str] = set()
    problems: list[str] = []
    for name, file in held.items():
        if not name.endswith(".weight"):
            continue
        beside = {key: held[key] for key in _beside(name) if key in held}
        kind = file.get_slice(name).get_dtype()
        if kind not in (_CODES, _BYTES):
            continue
        hidden.update(beside)
        try:
            read = _four_bits if kind == _CODES else _eight_bits
            expanded[name] = read(name, file.get_slice(name), beside, dtype, device)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ValueError(f"quantised weights cannot be read: {listed(problems)}")
    return [ExpandedFile(file, expanded, hidden) for file in files]


def _beside(name: str) -> list[str]:
    """Return what tensors beside a weight may be called."""
    layer = name.removesuffix("weight")
    return [
        *(name + each for each in (*_STATES, _MAP, _SCALES, _NESTED_MAP, _NESTED_SCALES)),
        layer + _ROWS,
        layer + _FORMAT,
    ]


def _four_bits(
    name: str, codes: Any, beside: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> FourBits:
    states = [name + each for each in _STATES if name + each in beside]
    if len(states) != 1:
        raise ValueError(f"it is of bytes, and {' or '.join(_STATES)} is not there")
    state = _read_state(beside[states[0]].get_tensor(states[0]))
    parts = (_MAP, _SCALES, *((_NESTED_MAP, _NESTED_SCALES) if state.nested_block else ()))
    if missing := [part for part in parts if name + part not in beside]:
        raise ValueError(f"{' and '.join(missing)} beside it are missing")
    tensors = {part: beside[name + part].get_tensor(name + part).flatten() for part in parts}
    count = state.outputs * state.inputs
    scales, blocks = tensors[_SCALES], -(-count // state.block)
    if codes.get_shape() != [-(-count // 2), 1] or len(scales) != blocks or len(tensors[_MAP]) != 16:
        raise ValueError(
            f"it has shape {codes.get_shape()}, {len(scales)} scales and {len(tensors[_MAP])} meanings, "
            f"which do not fit [{state.outputs}, {state.inputs}] in blocks of {state.block}"
        )
    if state.nested_block:
        over = tensors[_NESTED_SCALES].float()
        if len(tensors[_NESTED_MAP]) != 256 or len(over) != -(-blocks // state.nested_block):
            raise ValueError(f"{len(over)} nested scales do not fit {blocks} of {state.nested_block} each")
        of_blocks = torch.arange(blocks) // state.nested_block
        scales = tensors[_NESTED_MAP].float()[scales.int()] * over[of_blocks] + state.nested_offset
    return FourBits(name, state, codes, tensors[_MAP].float(), scales.float(), dtype, device)


def _read_state(text: Tensor) -> _State:
    """Read JSON of bytes. Raises ValueError that says what is not in it."""
    try:
        fields = json.loads(bytes(text.tolist()))
        outputs, inputs = fields["shape"]
        nested = fields.get("nested_blocksize") or 0
        offset = fields["nested_offset"] if nested else 0.0
        state = _State(int(outputs), int(inputs), int(fields["blocksize"]), int(nested), float(offset))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"its quant_state is not understood: {error!r}") from error
    if state.block < 1:
        raise ValueError(f"its quant_state has blocks of {state.block}")
    return state


def _eight_bits(
    name: str, integers: Any, beside: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> EightBits:
    rows, form = (name.removesuffix("weight") + each for each in (_ROWS, _FORMAT))
    if rows not in beside:
        raise ValueError(f"it is of bytes with a sign, and {_ROWS} is not there")
    if form in beside and int(beside[form].get_tensor(form)) != 0:
        raise ValueError(f"its {_FORMAT} is {int(beside[form].get_tensor(form))}; only rows (0) are read")
    largest, shape = beside[rows].get_slice(rows), integers.get_shape()
    if len(shape) != 2 or largest.get_shape() != shape[:1]:
        raise ValueError(f"it has shape {shape}, and {_ROWS} {largest.get_shape()}")
    return EightBits(name, integers, largest, dtype, device)
