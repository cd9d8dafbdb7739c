"""Work that others may end with a reason: by cancellation, which is then turned into that reason."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Stoppable(Protocol):
    def interrupt(self, reason: Exception) -> None: ...


class Interruptible:
    """`begin` and `end`, or `working`, stand around the work, in the task that does it."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._reason: Exception | None = None

    def begin(self) -> None:
        self._task = asyncio.current_task()

    def interrupt(self, reason: Exception) -> None:
        """Ends the work with `reason`, unless it has ended or is about to."""
        if self._task is not None and self._reason is None:
            self._reason = reason
            self._task.cancel()

    @property
    def interrupted(self) -> bool:
        """The work is about to hear of it, or has."""
        return self._reason is not None

    def end(self, error: BaseException | None) -> Exception | None:
        """From here on nobody interrupts. Returns the reason if `error` is the cancellation it brought."""
        task, self._task = self._task, None
        if not isinstance(error, asyncio.CancelledError) or self._reason is None or task is None:
            return None
        task.uncancel()
        return self._reason

    @contextmanager
    def working(self) -> Iterator[None]:
        """Raises the reason if the work was interrupted."""
        self.begin()
        try:
            yield
        except asyncio.CancelledError as cancelled:
            reason = self.end(cancelled)
            if reason is None:
                raise
            raise reason from None
        finally:
            self.end(None)
