"""A connected socket whose peer must answer soon and briefly."""

from __future__ import annotations

import socket
import time
from typing import Any


class BoundedSocket:
    """What comes after something was sent comes within `seconds` in all, and has `max_bytes` at most.

    A socket's own timeout begins anew with each byte: a peer that sends one now and then is never late.
    """

    def __init__(self, connected: socket.socket, seconds: float, max_bytes: int) -> None:
        self._socket = connected
        self._seconds = seconds
        self._max_bytes = self._left = max_bytes
        self._deadline = time.monotonic() + seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def sendall(self, data: bytes | memoryview) -> None:
        self._socket.settimeout(self._seconds)
        self._socket.sendall(data)
        self._left, self._deadline = self._max_bytes, time.monotonic() + self._seconds

    def recv(self, size: int) -> bytes:
        """Raises OSError when more has come than may."""
        if not self._left:
            raise OSError(f"an answer has more than {self._max_bytes} bytes")
        if self._socket.gettimeout() != 0:  # else it is only asked what is there
            seconds = self._deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError(f"an answer has taken more than {self._seconds:g} s")
            self._socket.settimeout(seconds)
        data = self._socket.recv(min(size, self._left))
        self._left -= len(data)
        return data
