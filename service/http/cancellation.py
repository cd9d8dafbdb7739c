"""Work that others may end with a reason: by cancellation, which is then turned into that reason."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol, Self


class Stoppable(Protocol):
    def interrupt(self, reason: Exception) -> None: ...


class Interruptible:
    """Use with `async with`, around the work, in the task that does it. The block raises the reason."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None  # while it works
        self._ended = False
        self._reason: Exception | None = None

    async def __aenter__(self) -> Self:
        if self._reason is not None:
            self._ended = True
            raise self._reason
        self._task = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = self._end_work(error)
        if reason is not None:
            raise reason from None

    def interrupt(self, reason: Exception) -> None:
        """End the work with `reason`, when it begins if it has not, unless it has ended or is about to."""
        if self._ended or self._reason is not None:
            return
        self._reason = reason
        if self._task is not None:
            self._task.cancel()

    @property
    def interrupted(self) -> bool:
        """Return whether the work is about to hear of it, or has."""
        return self._reason is not None

    def _end_work(self, error: BaseException | None) -> Exception | None:
        """Let nobody interrupt any more. Return the reason if `error` is the cancellation it brought."""
        task, self._task, self._ended = self._task, None, True
        if not isinstance(error, asyncio.CancelledError) or self._reason is None or task is None:
            return None
        task.uncancel()
        return self._reason
