"""An event loop on virtual time, which passes only while nothing can go on, and then at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Timers end in their order and nobody waits for them. What blocks the loop takes no virtual time."""

    def __init__(self) -> None:
        self._waiting = _Waiting()
        super().__init__(self._waiting)

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._waiting.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*_Arguments], _Result], *args: *_Arguments
    ) -> asyncio.Future[_Result]:
        """Call it here and now: virtual time would run away from another thread."""
        future: asyncio.Future[_Result] = self.create_future()
        future.set_result(func(*args))
        return future


class _Waiting(selectors.DefaultSelector):
    """Says that all the time has passed for which the loop would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("the simulation waits for something that no timer brings")
            self.now += timeout
        return ready
