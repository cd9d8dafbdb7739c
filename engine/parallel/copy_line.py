"""The line between two GPUs by which pieces of sums are copied: symmetric memory and a copy engine."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.parallel.piece_sums import NUMBERS, SLOTS, wait_for

FLAG = 8  # 16-bit numbers that are copied behind a piece, of which the first says that it is there
UNITS = SLOTS * (NUMBERS + FLAG)  # 16-bit numbers of a rank's memory


class CopyLine:
    """`kernels.parallel.piece_sums.Line` between two GPUs.

    Neither what is copied nor the flag behind it takes a multiprocessor: a kernel would have to wait for the
    products that it is to run beside.
    """

    def __init__(self, own: Tensor, other: Tensor, mapping: object) -> None:
        """own, other [UNITS] i16: this rank's memory, and the other's. mapping: what maps both.

        Nobody sends before both ranks have made theirs.
        """
        self._slots, self._flags = _parts(own)
        self._other_slots, self._other_flags = _parts(other)
        self._flags.zero_()
        self._set = torch.ones(FLAG, dtype=torch.int16, device=own.device)
        self._mapping = mapping
        self._copies = torch.cuda.Stream(own.device)

    @property
    def open(self) -> bool:
        return not torch.cuda.is_current_stream_capturing()

    def send(self, x: Tensor, slot: int) -> torch.cuda.Event:
        computed, copied = torch.cuda.Event(), torch.cuda.Event()
        computed.record()
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(computed)
            self._other_slots[slot, : x.numel()].view(x.dtype).copy_(x.view(-1))
            self._other_flags[slot].copy_(self._set)
            copied.record()
        return copied

    def receive(self, copy: torch.cuda.Event, slot: int, like: Tensor) -> Tensor:
        torch.cuda.current_stream().wait_event(copy)  # what was sent may be overwritten then
        wait_for(self._flags[slot])
        return self._slots[slot, : like.numel()].view(like.dtype).view(like.shape)


def _parts(memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots [SLOTS, NUMBERS] and the flags [SLOTS, FLAG] of a rank's memory."""
    slots, flags = memory.split((SLOTS * NUMBERS, SLOTS * FLAG))
    return slots.view(SLOTS, NUMBERS), flags.view(SLOTS, FLAG)
