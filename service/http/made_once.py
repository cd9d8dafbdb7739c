"""What takes long to make: made when it is first asked for, in a thread, for the loop has others to serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class MadeOnce(Generic[T]):
    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return it. Who asks while it is made waits for that; it is made on though they leave."""
        if self._made is None:
            self._made = asyncio.create_task(asyncio.to_thread(self._make))
        return await asyncio.shield(self._made)
