"""Packs many small host arrays into one transfer to the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.plan import Int32

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
        """Each array, flat, as a device tensor; one host-to-device copy in stream order."""
        self._turn = (self._turn + 1) % ROTATION
        host, view = self._host[self._turn], self._views[self._turn]
        sizes = [array.size for array in arrays]
        np.concatenate([array.ravel() for array in arrays], out=view[: sum(sizes)])
        sent = host[: sum(sizes)].to(self._device, non_blocking=True, copy=True)
        return list(sent.split(sizes))
