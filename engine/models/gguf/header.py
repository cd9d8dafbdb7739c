"""What a GGUF file begins with: metadata, and where its tensors are. Imports neither numpy nor torch.

The format is llama.cpp's: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32 = 0
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_DIMENSIONS = 4  # that ggml has


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file. shape: the dimension whose numbers stand beside each other last, as torch has it.

    kind: ggml's number of how its numbers are held. offset: in bytes, from the beginning of all tensors.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """data_start: where tensors begin in the file, in bytes."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    data_start: int


@dataclass(frozen=True, slots=True)
class Headers:
    """Those of all files that a model is in. metadata: what the first says, which is of all of them."""

    files: tuple[Header, ...]

    @property
    def metadata(self) -> dict[str, Any]:
        return self.files[0].metadata

    def find(self, name: str) -> TensorInfo | None:
        found = (each for header in self.files for each in header.tensors if each.name == name)
        return next(found, None)

    def numbers(self, name: str) -> list[float] | None:
        """Return the few numbers of a tensor; None if there is no such one. Raises ValueError."""
        for header in self.files:
            for each in header.tensors:
                if each.name != name:
                    continue
                size = 4 * each.elements
                with header.path.open("rb") as file:
                    file.seek(header.data_start + each.offset)
                    data = file.read(size)
                if each.kind != _F32 or len(data) != size:
                    raise ValueError(f"{header.path}: {name} is not of {each.elements} numbers of 32 bits")
                return list(struct.unpack(f"<{each.elements}f", data))
        return None


def read_headers(path: Path) -> Headers:
    """Read all files of the model that one is of: a model may be split. Raises ValueError."""
    return Headers(tuple(read_header(each) for each in parts_of(path)))


def parts_of(path: Path) -> list[Path]:
    """Return all files of the model that one is of, in their order. Raises ValueError if one is missing."""
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    stem, _, count = split.groups()
    parts = [path.with_name(f"{stem}-{part:05}-of-{count}.gguf") for part in range(1, int(count) + 1)]
    missing = [each.name for each in parts if not each.is_file()]
    if missing or not parts:
        raise ValueError(f"{path} is one of {count} files, and {', '.join(missing[:3])} is not beside it")
    return parts


def stem_of(name: str) -> str:
    """Return the name of a model that a file's name gives it."""
    split = _SPLIT.fullmatch(name)
    return split[1] if split else name.removesuffix(SUFFIX)


def read_header(path: Path) -> Header:
    """Raise ValueError if the file is no GGUF file, or not whole as far as its header tells."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(path, _Reader(data))
    except (struct.error, UnicodeDecodeError, _Damaged, OSError, ValueError) as error:
        if isinstance(error, _Refused):
            raise ValueError(f"{path} {error}") from None
        raise ValueError(f"{path} is not a complete GGUF file: {error}; download it again") from error


class _Damaged(Exception):
    pass


class _Refused(ValueError):
    pass


class _Reader:
    """Reads one value after the other, all little-endian."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def numbers(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        found = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def string(self) -> str:
        (length,) = self.numbers("Q")
        end = self.at + length
        if end > len(self.data):
            raise _Damaged(f"it ends at byte {len(self.data)}, within a name of {length} bytes")
        text = self.data[self.at : end].decode()
        self.at = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            of, count = self.numbers("IQ")
            if of == _ARRAY:
                raise _Damaged("its metadata has a list of lists")
            if of in _NUMBERS:
                if count > len(self.data):
                    raise _Damaged(f"it ends at byte {len(self.data)}, within a list of {count} numbers")
                return list(self.numbers(f"{count}{_NUMBERS[of]}"))
            return [self.value(of) for _ in range(count)]
        if kind not in _NUMBERS:
            raise _Damaged(f"its metadata has a value of the unknown type {kind}")
        (value,) = self.numbers(_NUMBERS[kind])
        return value


def _header(path: Path, reader: _Reader) -> Header:
    if reader.data[:4] != _MAGIC:
        raise _Refused("is no GGUF file: it does not begin with GGUF")
    reader.at = 4
    version, tensor_count, value_count = reader.numbers("IQQ")
    if version not in _VERSIONS:
        known = " and ".join(map(str, _VERSIONS))
        raise _Refused(
            f"is of GGUF's version {version}, or of another byte order; those of {known}, little-endian, are "
            "read: convert the model again, by llama.cpp's convert_hf_to_gguf.py"
        )
    metadata = {}
    for _ in range(value_count):
        name = reader.string()
        (kind,) = reader.numbers("I")
        metadata[name] = reader.value(kind)
    tensors = tuple(_tensor(reader) for _ in range(tensor_count))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Damaged(f"its alignment is {alignment!r}")
    data_start = -(-reader.at // alignment) * alignment
    beyond = [each.name for each in tensors if data_start + each.offset >= len(reader.data)]
    if beyond:
        raise _Damaged(f"it ends at byte {len(reader.data)}, before {beyond[0]}")
    return Header(path, metadata, tensors, data_start)


def _tensor(reader: _Reader) -> TensorInfo:
    name = reader.string()
    (dimensions,) = reader.numbers("I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise _Damaged(f"{name} has {dimensions} dimensions")
    shape = reader.numbers(f"{dimensions}Q")
    if not all(shape):
        raise _Damaged(f"{name} has the shape {list(reversed(shape))}")
    kind, offset = reader.numbers("IQ")
    return TensorInfo(name, tuple(reversed(shape)), kind, offset)
