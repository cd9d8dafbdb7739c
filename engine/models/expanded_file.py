"""Safetensors files with quantised weights, read as if they had the numbers that those stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

_PIECE = 1 << 20  # numbers that are expanded at once
NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # as safetensors has them
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class ExpandedTensor(Protocol):
    """A weight of which any part is read as the numbers that it stands for, as a slice of safetensors'."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any) -> Tensor: ...


class ExpandedFile:
    """A file as safetensors opens it, but for quantised weights, which are what they stand for."""

    def __init__(
        self,
        file: Any,
        expanded: Mapping[str, ExpandedTensor],
        hidden: set[str],
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        """expanded: weights by name. hidden: names of what else these are made of.

        renamed: of what files have, the names of the weights that stand in its place.
        """
        self._file, self._expanded, self._hidden, self._renamed = file, expanded, hidden, renamed or {}

    def offset_keys(self) -> list[str]:
        """Return the names of its tensors, in the order of their bytes."""
        shown = (name for name in self._file.offset_keys() if name not in self._hidden)
        return [self._renamed.get(name, name) for name in shown]

    def get_slice(self, name: str) -> Any:
        return self._expanded.get(name) or self._file.get_slice(name)

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._expanded[name][...] if name in self._expanded else self._file.get_tensor(name)
        return tensor


def ranges_of(index: Any, shape: list[int]) -> list[tuple[int, int]]:
    """Return the range of each dimension that an index of slices is of."""
    given = () if index is ... else index if isinstance(index, tuple) else (index,)
    ranges = [each.indices(size)[:2] for each, size in zip(given, shape, strict=False)]
    return ranges + [(0, size) for size in shape[len(ranges) :]]


def rows_at_once(columns: int, piece: int = _PIECE) -> int:
    """Return how many rows of so many numbers are expanded at once: at least one."""
    return max(piece // max(columns, 1), 1)


def round_once(expanded: Tensor, numbers: Tensor, name: str) -> None:
    """Put numbers in fp32 to a tensor of another dtype; raise ValueError by name if it does not have them."""
    most = torch.finfo(expanded.dtype).max
    low, high = torch.stack(numbers.aminmax()).tolist()
    if not -most <= low <= high <= most:  # nor if one is NaN
        raise ValueError(f"{name} stands for numbers that are not finite in {expanded.dtype}")
    expanded.copy_(numbers)
