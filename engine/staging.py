"""Packs many small host arrays into one transfer to the device."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from engine.plan import Int32

# Words. Triton compiles a kernel once more for each pattern of pointers that are 16-byte aligned or not.
ALIGNMENT = 4
ROTATION = 6  # three uploads a step, and a step's are free again once the one after next is launched


def _begins(arrays: list[Int32]) -> list[int]:
    """Where each array begins in a buffer that holds them all, and how long that is."""
    return list(accumulate((-(-array.size // ALIGNMENT) * ALIGNMENT for array in arrays), initial=0))


def padded_words(arrays: list[Int32]) -> int:
    """Words of a buffer that holds `arrays`."""
    return _begins(arrays)[-1]


def split_aligned(buffer: Tensor, arrays: list[Int32]) -> list[Tensor]:
    """The views of `buffer` that `arrays` are uploaded to, each flat and aligned."""
    return [buffer[begin : begin + array.size] for array, begin in zip(arrays, _begins(arrays), strict=False)]


class Staging:
    """Rotating pinned int32 buffers, from which arrays go to the device."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = [torch.empty(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(ROTATION)]
        self._views = [buffer.numpy() for buffer in self._host]
        self._device = device
        self._turn = 0

    def upload(self, arrays: list[Int32], target: Tensor | None = None) -> list[Tensor]:
        """Each array as a view of `target`, or of a new device buffer; one copy in stream order."""
        self._turn = (self._turn + 1) % ROTATION
        host, view = self._host[self._turn], self._views[self._turn]
        begins = _begins(arrays)
        for array, begin in zip(arrays, begins, strict=False):
            view[begin : begin + array.size] = array.ravel()
        if target is None:
            target = torch.empty(begins[-1], dtype=torch.int32, device=self._device)
        target.copy_(host[: begins[-1]], non_blocking=True)
        return split_aligned(target, arrays)
