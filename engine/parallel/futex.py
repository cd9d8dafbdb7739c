"""Linux' futex: processes sleep while a word of memory that they share is the same, and others wake them."""

from __future__ import annotations

import ctypes
import platform

_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE = 0, 1  # <linux/futex.h>; of memory that several processes share
_syscall = ctypes.CDLL(None).syscall  # lets the interpreter go meanwhile
_syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """The 32 bits at an address, which stay mapped for as long as this is used."""

    def __init__(self, address: int, timeout_seconds: float) -> None:
        """timeout_seconds: for which a `wait` sleeps at most. Raises OSError where there is no such call."""
        if _CALL is None:
            raise OSError(f"no futex is known on {platform.machine()}; x86_64 and aarch64 have one")
        timespec = _Timespec(int(timeout_seconds), int(timeout_seconds % 1 * 1e9))
        self._timespec = timespec  # the call reads it
        self._word = ctypes.c_void_p(address)
        self._call, self._wait, self._wake = ctypes.c_long(_CALL), ctypes.c_long(_WAIT), ctypes.c_long(_WAKE)
        self._none = ctypes.c_void_p(None)
        self._timeout = ctypes.byref(timespec)

    def wait(self, value: int) -> None:
        """Sleep if the word still has the low 32 bits of `value`; wake by `wake`, or when the time is up."""
        expected = ctypes.c_long(value & 0xFFFFFFFF)
        _syscall(self._call, self._word, self._wait, expected, self._timeout, self._none, ctypes.c_long(0))

    def wake(self, count: int) -> None:
        """Wake so many of those who wait, who came first. It takes a few µs for each, and one for nobody."""
        number = ctypes.c_long(count)
        _syscall(self._call, self._word, self._wake, number, self._none, self._none, ctypes.c_long(0))
