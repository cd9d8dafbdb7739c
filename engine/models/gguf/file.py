"""A GGUF file that is open: its tensors' bytes, by the names that it has."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from quire.engine.models.gguf.header import Header, TensorInfo, read_header


class GgufFile:
    """A file, its header read; numbers stay in the file. Names and bytes are as it has them."""

    def __init__(self, header: Header) -> None:
        """Raises ValueError, by name, for a tensor of an unknown type, or one that the file ends within."""
        self.header = header
        self._bytes = np.memmap(header.path, np.uint8, "r")
        problems = [told for each in header.tensors if (told := self._wrong(each))]
        if problems:
            more = f", and so on for {len(problems)} tensors" if len(problems) > 1 else ""
            raise ValueError(f"{header.path.resolve()} cannot be read: {problems[0]}{more}")

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        del self._bytes

    def _wrong(self, info: TensorInfo) -> str:
        kind = known_kind(info.kind)
        if kind is None:
            return f"{info.name} is of the type {_kind_name(info.kind)}, which is not known"
        in_block, block_bytes = GGML_QUANT_SIZES[kind]
        if len(info.shape) == 1 and in_block > 1:
            return f"{info.name} is a vector in blocks ({kind.name}), which is not known"
        if info.shape[-1] % in_block:
            return f"{info.name} has rows of {info.shape[-1]} numbers, in blocks of {in_block}"
        end = self.header.data_start + info.offset + info.elements // in_block * block_bytes
        if end > len(self._bytes):
            return f"{info.name} ends at byte {end}, and the file at {len(self._bytes)}: download it again"
        return ""

    def rows(self, info: TensorInfo, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the bytes of a tensor's rows of so many numbers [rows, bytes of one]."""
        in_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.kind)]
        begin = self.header.data_start + info.offset
        size = width // in_block * block_bytes
        count = info.elements // width
        return self._bytes[begin : begin + count * size].reshape(count, size)


def open_gguf(path: Path) -> GgufFile:
    """Raise ValueError for a file that is not whole, or has tensors of an unknown type."""
    return GgufFile(read_header(path))


@cache
def known_kind(kind: int) -> GGMLQuantizationType | None:
    """Return a kind by its number; None if there is none such, or numbers are not made of its blocks."""
    try:
        known = GGMLQuantizationType(kind)
        dequantize(np.zeros((1, GGML_QUANT_SIZES[known][1]), np.uint8), known)
    except (ValueError, NotImplementedError):
        return None
    return known


def _kind_name(kind: int) -> str:
    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return str(kind)
