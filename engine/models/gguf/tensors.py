"""The weights of GGUF files, as the folder that their model was made from has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from quire.engine.models.expanded_file import NAMES, ranges_of, round_once
from quire.engine.models.gguf.architectures import Architecture, architecture_of
from quire.engine.models.gguf.file import GgufFile
from quire.engine.models.gguf.header import TensorInfo

_PIECE = 1 << 20  # numbers that are expanded at once
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GATE_OF_SHARED = "ffn_gate_inp_shexp"  # a vector in files, and a matrix of one row in a folder
# Factors of rotary positions, which the configuration has.
_IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A weight of which any part is read as the numbers that it stands for, as a slice of safetensors'.

    rows: its rows' bytes [rows, bytes of one], in the file's order; a vector has one number in each. order:
    which of them each row of the weight is; None: they are in its order. transposed: rows here are columns of
    the weight. less: is subtracted of all numbers.
    """

    name: str
    kind: GGMLQuantizationType
    rows: Any
    width: int
    dtype: torch.dtype
    device: torch.device
    order: Any = None
    less: float = 0.0
    transposed: bool = False
    vector: bool = False

    def get_shape(self) -> list[int]:
        if self.vector:
            return [len(self.rows)]
        shape = [len(self.rows), self.width]
        return shape[::-1] if self.transposed else shape

    def get_dtype(self) -> str:
        return NAMES[self.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        """Read ranges of it. Raises ValueError for numbers that the dtype does not have."""
        ranges = ranges_of(index, self.get_shape())
        if self.vector:
            return self._read(ranges[0], (0, 1))[:, 0]
        if self.transposed:
            return self._read(ranges[1], ranges[0]).T
        return self._read(ranges[0], ranges[1])

    def _read(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        begin, end = columns
        found = torch.empty(max(rows[1] - rows[0], 0), max(end - begin, 0), dtype=self.dtype)
        if not found.numel():
            return found.to(self.device)
        in_block, block_bytes = GGML_QUANT_SIZES[self.kind]
        first = begin // in_block
        held = slice(first * block_bytes, -(-end // in_block) * block_bytes)
        inside = slice(begin - first * in_block, end - first * in_block)
        step = max(_PIECE // (end - begin), 1)
        for at in range(0, len(found), step):
            piece = slice(rows[0] + at, min(rows[0] + at + step, rows[1]))
            data = self.rows[piece] if self.order is None else self.rows[self.order[piece]]
            blocks = np.ascontiguousarray(data[:, held])
            numbers = dequantize(blocks, self.kind)[:, inside]
            if self.less:
                numbers = numbers - np.float32(self.less)
            held_here = torch.from_numpy(np.require(numbers, requirements=("C", "W")))
            round_once(found[at : at + step], held_here, self.name)
        return found.to(self.device)


class NamedFile:
    """A file as safetensors opens it, with the names and weights that a folder of the model has."""

    def __init__(self, weights: dict[str, GgufTensor]) -> None:
        self._weights = weights

    def offset_keys(self) -> list[str]:
        """Return the names of its weights, in the order of their bytes."""
        return [*self._weights]

    def get_slice(self, name: str) -> GgufTensor:
        return self._weights[name]

    def get_tensor(self, name: str) -> Tensor:
        return self._weights[name][...]


def expand_gguf(files: list[Any], dtype: torch.dtype, device: torch.device) -> list[NamedFile]:
    """Return the files of a model, the first first, as if they had the numbers that their weights stand for.

    What the architecture has no name for keeps its own. Raises ValueError for files of other formats.
    """
    if not all(isinstance(each, GgufFile) for each in files):
        raise ValueError("quantization_config has the method 'gguf', and the files are no GGUF files")
    metadata = files[0].header.metadata
    architecture = architecture_of(metadata)
    heads = {
        name: int(np.max(metadata.get(f"{metadata['general.architecture']}.attention.{key}", 1)))
        for name, key in (("attn_q", "head_count"), ("attn_k", "head_count_kv"))
    }
    return [
        NamedFile(
            {
                each.name: each
                for info in sorted(file.header.tensors, key=lambda info: info.offset)
                if info.name not in _IN_CONFIG
                for each in _weights(file, info, architecture, heads, dtype, device)
            }
        )
        for file in files
    ]


def _weights(
    file: GgufFile,
    info: TensorInfo,
    architecture: Architecture,
    heads: dict[str, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[GgufTensor]:
    """Yield the weights that a tensor is of: one, or of experts as many."""
    kind = GGMLQuantizationType(info.kind)
    is_vector = len(info.shape) == 1 and _GATE_OF_SHARED not in info.name
    width = 1 if is_vector else info.shape[-1]
    rows = file.rows(info, width)
    found = GgufTensor(info.name, kind, rows, width, dtype, device, vector=is_vector)
    part, suffix = info.name, ""
    parsed = _IN_LAYER.fullmatch(info.name)
    if parsed is not None:
        layer, part, suffix = parsed.groups()
        known = architecture.block.get(part)
        name = f"{architecture.layers}.{layer}.{known}.{suffix}"
    else:
        part, _, suffix = info.name.rpartition(".")
        known = architecture.outer.get(part)
        name = f"{known}.{suffix}"
    if known is None:
        yield found
        return
    if architecture.permuted and part in heads:
        found = replace(found, order=_halves(info.shape[0], heads[part]))
    if part in architecture.transposed:
        found = replace(found, transposed=True)
    if suffix == "weight" and part.endswith("norm"):
        found = replace(found, less=architecture.less)
    if "{}" not in known:
        yield replace(found, name=name)
        return
    experts = info.shape[0]
    size = len(rows) // experts
    for expert in range(experts):
        own = rows[expert * size : (expert + 1) * size]
        yield replace(found, name=name.format(expert), rows=own)


def _halves(rows: int, heads: int) -> Any:
    """Return which row of a file each row is, of queries or keys whose heads' halves stand in turns there."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
