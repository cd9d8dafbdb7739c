"""Packs many small host arrays into one transfer to the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from quire.engine.arrays import Int32
from quire.kernels.pointwise.pinned_copy import copy_pinned

# Words. Triton compiles a kernel once more for each pattern of pointers that are 16-byte aligned or not.
ALIGNMENT = 4
ROTATION = 6  # three uploads a step at most, and a step is done before the one after next is launched


def _begins(arrays: Sequence[Int32]) -> list[int]:
    """Return where each array begins in a buffer that holds them all, and how long that is."""
    return list(accumulate((-(-array.size // ALIGNMENT) * ALIGNMENT for array in arrays), initial=0))


def sent(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of a few `values` on the device, copied in stream order: nobody on the host waits.

    It goes by a copy engine, which may have KV blocks to bring first: for what few steps need.
    """
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class PaddedInputs:
    """A device buffer for flat arrays of up to certain lengths, shorter ones padded; at first all padding."""

    def __init__(self, padding: Sequence[Int32], device: torch.device) -> None:
        """`padding`: full-length arrays, of which shorter ones take their ends."""
        self.lengths = [len(array) for array in padding]
        self.begins = _begins(padding)
        self.words = np.zeros(self.begins[-1], np.int32)
        for array, begin in zip(padding, self.begins, strict=False):
            self.words[begin : begin + len(array)] = array
        self.buffer = torch.tensor(self.words, device=device)

    def split(self) -> list[Tensor]:
        """Return the arrays on the device, which keep their addresses for as long as this is there."""
        return [
            self.buffer[begin : begin + length]
            for begin, length in zip(self.begins, self.lengths, strict=False)
        ]

    def hold(self, arrays: Sequence[Int32]) -> bool:
        """Return whether each of `arrays` fits."""
        return all(len(array) <= length for array, length in zip(arrays, self.lengths, strict=True))


class Staging:
    """Rotating pinned int32 buffers, from which arrays go to the device.

    A buffer that is too small is replaced by a larger one when its turn comes: the most that a step can ever
    send, whole tables for all rows, would be gigabytes of pinned memory that hardly any step needs.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        """`capacity`: words of nearly all uploads."""
        self._pinned = device.type == "cuda"
        self._host = [self._buffer(capacity) for _ in range(ROTATION)]
        self._views = [buffer.numpy() for buffer in self._host]
        self._copy = copy_pinned if self._pinned else Tensor.copy_
        self._device = device
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        """Return how many bytes the buffers take."""
        return sum(buffer.nbytes for buffer in self._host)

    def upload(self, arrays: Sequence[Int32]) -> list[Tensor]:
        """Copy the arrays in stream order, all at once; return them as views of a new device buffer."""
        begins = _begins(arrays)
        host, view = self._next(begins[-1])
        for array, begin in zip(arrays, begins, strict=False):
            view[begin : begin + array.size] = array.ravel()
        target = torch.empty(begins[-1], dtype=torch.int32, device=self._device)
        self._copy(target, host[: begins[-1]])
        return [target[begin : begin + array.size] for array, begin in zip(arrays, begins, strict=False)]

    def upload_into(self, inputs: PaddedInputs, arrays: Sequence[Int32]) -> None:
        """Copy flat arrays that `inputs` hold into them, padded, in stream order and all at once."""
        words = len(inputs.words)
        host, view = self._next(words)
        view[:words] = inputs.words
        for array, begin in zip(arrays, inputs.begins, strict=False):
            view[begin : begin + len(array)] = array
        self._copy(inputs.buffer, host[:words])

    def upload_words(self, target: Tensor, words: Int32) -> None:
        """Copy `words` to all of `target` [N] i32 on the device, in stream order."""
        host, view = self._next(words.size)
        view[: words.size] = words.ravel()
        self._copy(target, host[: words.size])

    def _next(self, words: int) -> tuple[Tensor, Int32]:
        """Return the buffer whose turn it is, which holds so many words, and the host's view of it."""
        self._turn = turn = (self._turn + 1) % ROTATION
        if words > len(self._views[turn]):  # nothing reads the smaller one any more: it is its turn
            self._host[turn] = self._buffer(1 << (words - 1).bit_length())
            self._views[turn] = self._host[turn].numpy()
        return self._host[turn], self._views[turn]

    def _buffer(self, words: int) -> Tensor:
        return torch.empty(words, dtype=torch.int32, pin_memory=self._pinned)
