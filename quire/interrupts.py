"""Ctrl-C between two steps of an engine, and never within one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

PATIENCE = 1.0  # seconds, after which another Ctrl-C is not put off any more


class PostponedInterrupt:
    """A context in which SIGINT waits for `check`, or for the end; outside the main thread it does nothing.

    A handler that Python itself calls may raise after any bytecode, where whatever it is that is being done
    is half done. What was the handler before is called instead, once, where that does no harm.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None  # what was it before
        self._since: float | None = None  # when the first one came
        self._waits = False  # one has come that the handler has not been told of

    def __enter__(self) -> PostponedInterrupt:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):  # else it is ignored, or ends the process
                self._handler = handler
                signal.signal(signal.SIGINT, self._postpone)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt, or do what else the handler does, if SIGINT has come."""
        if self._waits and self._handler is not None:
            self._waits = False
            self._handler(signal.SIGINT, None)

    def _postpone(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since > PATIENCE and self._handler is not None:
            self._waits = False
            self._handler(number, frame)
        else:
            self._waits = True
