"""Gives the system back what requests have freed.

The C library keeps it: a server's size would be that of the most that it ever held at once, and a leak would
hide in it.
"""

from __future__ import annotations

import ctypes
import threading

SECONDS = 30.0


def give_back() -> None:
    """Return free pages to the system, on other threads' time: the interpreter is let go meanwhile."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


class FreedMemory:
    """A thread that gives back what is free, now and again."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="quire-freed-memory", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            give_back()
