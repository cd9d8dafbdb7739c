"""Copies weights out of files that are mapped into memory, to where a model has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any, TypeAlias

import torch
from torch import Tensor

Copy: TypeAlias = Callable[[Tensor, Tensor], object]
_TURNED_ROWS = 4096  # of a matrix that are turned over at once
PIECE_BYTES = 16 << 20
_PIECES = 4  # on their way at once


def copies_to(device: torch.device) -> Copy:
    """Return a function that copies a tensor on a CPU, its second argument, to its place on the device.

    It rounds to the place's type. On a GPU what it has copied is there for what its stream runs next.
    """
    return PinnedCopies().copy if device.type == "cuda" else _fill


class CopiedSlice:
    """A tensor of a file as safetensors has its slices, of which any part is read to a device."""

    def __init__(self, held: Any, device: torch.device, copy: Copy) -> None:
        self._held, self._device, self._copy = held, device, copy

    def get_shape(self) -> list[int]:
        shape: list[int] = self._held.get_shape()
        return shape

    def get_dtype(self) -> str:
        dtype: str = self._held.get_dtype()
        return dtype

    def __getitem__(self, index: Any) -> Tensor:
        part = self._held[index]
        place = torch.empty(part.shape, dtype=part.dtype, device=self._device)
        self._copy(place, part)
        return place


class PinnedCopies:
    """Copies to a GPU through pinned memory, piece by piece.

    All cores copy a piece out of its file while the device takes the one before. From mapped memory alone
    the driver copies with one of them.
    """

    def __init__(self) -> None:
        pieces = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_PIECES)]
        self._turns = cycle([(piece, torch.cuda.Event()) for piece in pieces])

    def copy(self, place: Tensor, x: Tensor) -> None:
        if x.is_cuda:
            place.copy_(x)
            return
        for part, theirs in _pieces(place, x):
            piece, taken = next(self._turns)
            taken.synchronize()
            staged = piece[: theirs.numel() * place.itemsize].view(place.dtype).view(theirs.shape)
            staged.copy_(theirs)
            part.copy_(staged, non_blocking=True)
            taken.record(torch.cuda.current_stream(place.device))


def _pieces(place: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of a place, and of what goes there, that take `PIECE_BYTES` of the place's type at most."""
    if x.numel() * place.itemsize <= PIECE_BYTES:
        yield place, x
    elif x.shape[0] > 1:
        rows = max(1, PIECE_BYTES // (x[0].numel() * place.itemsize))
        for part, theirs in zip(place.split(rows), x.split(rows), strict=True):
            yield from _pieces(part, theirs)
    else:
        yield from _pieces(place[0], x[0])


def _fill(place: Tensor, x: Tensor) -> None:
    """Copy x to its place, which on a CPU is a matrix by columns: torch alone takes several times as long."""
    if place.dim() != 2 or place.stride(0) != 1:
        place.copy_(x)
        return
    for rows, theirs in zip(place.split(_TURNED_ROWS), x.split(_TURNED_ROWS), strict=True):
        rows.T.copy_(theirs.T.contiguous())
