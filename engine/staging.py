"""Packs many small host arrays into one transfer to the device."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from engine.plan import Int32

# Words. Triton compiles a kernel once more for each pattern of pointers that are 16-byte aligned or not.
ALIGNMENT = 4
ROTATION = 4  # two uploads a step, and a step's are free again once the one after next is launched


class Staging:
    """Rotating pinned int32 buffers and the device buffer that receives them."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = [torch.empty(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(ROTATION)]
        self._views = [buffer.numpy() for buffer in self._host]
        self._device = device
        self._turn = 0

    def upload(self, arrays: list[Int32]) -> list[Tensor]:
        """Each array, flat, as an aligned device tensor; one host-to-device copy in stream order."""
        self._turn = (self._turn + 1) % ROTATION
        host, view = self._host[self._turn], self._views[self._turn]
        begins = list(accumulate((-(-array.size // ALIGNMENT) * ALIGNMENT for array in arrays), initial=0))
        for array, begin in zip(arrays, begins, strict=False):
            view[begin : begin + array.size] = array.ravel()
        sent = host[: begins[-1]].to(self._device, non_blocking=True, copy=True)
        return [sent[begin : begin + array.size] for array, begin in zip(arrays, begins, strict=False)]
