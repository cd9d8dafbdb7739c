"""What pages have heard of the pool in the last minutes, for whoever comes later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

MAX_SECONDS = 600.0
MAX_BYTES = 32 << 20
CHAPTER = 60  # changes


@dataclass
class _Chapter:
    """The whole map at a moment, and what changed after it."""

    at: float
    whole: msgspec.Raw
    changes: list[msgspec.Raw] = field(default_factory=list)
    num_bytes: int = 0


class Past:
    """Changes in chapters, each of which begins with the whole map, so that the oldest can be forgotten."""

    def __init__(self, max_seconds: float = MAX_SECONDS, max_bytes: int = MAX_BYTES) -> None:
        self._max_seconds = max_seconds
        self._max_bytes = max_bytes
        self._chapters: deque[_Chapter] = deque()

    def add(self, at: float, change: msgspec.Raw, whole: Callable[[], msgspec.Raw]) -> None:
        """Note a change; `whole` gives the map after it. The first of all is told of by the map."""
        chapters = self._chapters
        if chapters:
            chapters[-1].changes.append(change)
            chapters[-1].num_bytes += len(bytes(change))
        if not chapters or len(chapters[-1].changes) >= CHAPTER:
            begun = whole()
            chapters.append(_Chapter(at, begun, num_bytes=len(bytes(begun))))
        # A chapter is over when the next one begins.
        while len(chapters) > 1 and (chapters[1].at <= at - self._max_seconds or self._is_full):
            chapters.popleft()

    @property
    def _is_full(self) -> bool:
        return sum(chapter.num_bytes for chapter in self._chapters) > self._max_bytes

    def events(self) -> list[msgspec.Raw]:
        """Return the oldest map that is known, and all changes since."""
        changes = [change for chapter in self._chapters for change in chapter.changes]
        return [self._chapters[0].whole, *changes] if self._chapters else []

    def clear(self) -> None:
        self._chapters.clear()
