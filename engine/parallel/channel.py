"""Frames from one process to several by shared memory: written once, however many read them."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.engine.parallel.futex import Futex

SLOTS = 32  # frames, or parts of large ones, that readers may be behind
SLOT_BYTES = 1 << 18
LINE = 8  # words of a cache line: what different processes write lies on different ones
# A reader's words: parts that it has read, frames that it has done with, and its word to the writer.
READ, DONE, TOLD = range(3)
WOKEN = 2  # readers that each one wakes that was asleep; the writer wakes one
LOOKS = 64  # in sequence, some 5 µs, before a reader asks whether it should sleep
CHECK_SECONDS = 0.05  # between two looks at what is there, should a wake have been missed


class _Memory:
    """The words and slots that writer and readers share.

    Words [0]: parts written. Then each reader's line. Each slot begins with its part's length, negative if
    the frame goes on. x86 keeps the order of writes, which is all that is relied on: a part is there before
    it is counted.
    """

    def __init__(self, fd: int, readers: int) -> None:
        self.map = mmap.mmap(fd, num_bytes(readers))
        self.words: NDArray[np.int64] = np.frombuffer(self.map, np.int64, (1 + readers) * LINE)
        self.written = Futex(self.words.ctypes.data, CHECK_SECONDS)
        self._slots = (1 + readers) * LINE * 8

    def slot(self, part: int) -> int:
        """Return where a part's slot begins in the map."""
        return self._slots + part % SLOTS * SLOT_BYTES


def num_bytes(readers: int) -> int:
    """Return how much memory a channel of so many readers shares."""
    return (1 + readers) * LINE * 8 + SLOTS * SLOT_BYTES


class Writer:
    """The end that frames go in at."""

    def __init__(self, readers: int) -> None:
        self.fd = os.memfd_create("quire-ranks")
        os.ftruncate(self.fd, num_bytes(readers))
        self._memory = _Memory(self.fd, readers)
        self._lines = self._memory.words[LINE:].reshape(readers, LINE)
        self.sent = 0  # frames
        self._written = 0
        self._room = SLOTS  # parts that may have been written before readers are looked at again

    def send(self, frame: bytes, check: Callable[[], None]) -> None:
        """Give a frame to all readers.

        Where one is so far behind that there is no room, wait; `check`, called meanwhile, may raise.
        """
        most = SLOT_BYTES - 8
        for begin in range(0, len(frame), most):
            part = frame[begin : begin + most]
            self._write(part, check, goes_on=begin + most < len(frame))
        self.sent += 1

    def _write(self, part: bytes, check: Callable[[], None], *, goes_on: bool) -> None:
        memory = self._memory
        if self._written >= self._room:
            self._wait_for_room(check)
        slot = memory.slot(self._written)
        memory.map[slot + 8 : slot + 8 + len(part)] = part
        length = -len(part) if goes_on else len(part)
        memory.map[slot : slot + 8] = length.to_bytes(8, "little", signed=True)
        self._written += 1
        memory.words[0] = self._written
        memory.written.wake(1)  # who wakes others; to ask who sleeps takes as long as to wake nobody

    def _wait_for_room(self, check: Callable[[], None]) -> None:
        while self._written >= (room := int(self._lines[:, READ].min()) + SLOTS):
            check()
            time.sleep(1e-4)
        self._room = room

    def has_taken(self, reader: int) -> bool:
        """Tell whether a reader has taken all that was sent."""
        return bool(self._lines[reader, READ] == self._written)

    def behind(self, frames: int) -> set[int]:
        """Return the readers that have not done with the first so many frames, and asked for the next."""
        return {reader for reader, done in enumerate(self._lines[:, DONE].tolist()) if done < frames}

    def told(self) -> list[int]:
        """Return the word that each reader has told last."""
        words: list[int] = self._lines[:, TOLD].tolist()
        return words

    def close(self) -> None:
        os.close(self.fd)


class Reader:
    """One of the ends that frames come out at."""

    def __init__(self, fd: int, index: int, readers: int, spin_seconds: float) -> None:
        """spin_seconds: for which it looks before it sleeps, 0: it never looks. A wake takes tens of µs."""
        self._memory = _Memory(fd, readers)
        self._line = self._memory.words[LINE * (1 + index) : LINE * (2 + index)]
        self._spin_seconds = spin_seconds
        self._taken = 0
        self._received = 0  # frames

    def receive(self, is_near: Callable[[], bool] = lambda: False) -> bytearray:
        """Wait for the next frame, for ever, and return it; those before it are done with.

        is_near: whether one can be expected soon; a reader that looks before it sleeps does so meanwhile.
        """
        self._line[DONE] = self._received
        frame = bytearray()
        goes_on = True
        while goes_on:
            self._wait(is_near)
            memory = self._memory
            slot = memory.slot(self._taken)
            length = int.from_bytes(memory.map[slot : slot + 8], "little", signed=True)
            goes_on = length < 0
            frame += memory.map[slot + 8 : slot + 8 + abs(length)]
            self._taken += 1
            self._line[READ] = self._taken
        self._received += 1
        return frame

    def tell(self, word: int) -> None:
        """Leave a word for the writer to find, instead of the one before."""
        self._line[TOLD] = word

    def _wait(self, is_near: Callable[[], bool]) -> None:
        words, taken = self._memory.words, self._taken
        if words[0] > taken or (self._spin_seconds and self._sees(is_near)):
            return
        while words[0] <= taken:
            self._memory.written.wait(taken)
        self._memory.written.wake(WOKEN)

    def _sees(self, is_near: Callable[[], bool]) -> bool:
        """Look for the next part; return whether it came."""
        words, taken = self._memory.words, self._taken
        end = time.perf_counter() + self._spin_seconds
        while True:
            for _ in range(LOOKS):
                if words[0] > taken:
                    return True
            now = time.perf_counter()
            if is_near():
                end = now + self._spin_seconds
            elif now > end:
                return False
