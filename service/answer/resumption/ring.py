"""The latest events of a stream."""

from __future__ import annotations

import re
from typing import NamedTuple

from quire.service.errors import ApiError, bad_value

MIN_EVENTS = 8  # so many are kept whatever their size
_ID = re.compile(r"([0-9]{1,10})(?:\.([0-9]{1,10}))?")


class EventId(NamedTuple):
    """The number of tokens that the stream had after the event, and its number among the events there."""

    tokens: int
    more: int

    def __str__(self) -> str:
        return f"{self.tokens}.{self.more}" if self.more else f"{self.tokens}"

    @classmethod
    def parse(cls, text: str) -> EventId:
        """Raises ApiError 400."""
        found = _ID.fullmatch(text)
        if found is None:
            message = f"Last-Event-ID must be the id of an event, such as 17 or 17.1, got {text[:64]!r}"
            raise bad_value("last-event-id", message)
        return cls(int(found[1]), int(found[2] or 0))


class EventRing:
    """Events are numbered from 0. Beyond `max_bytes` the oldest are forgotten."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._events: dict[int, tuple[EventId, bytes]] = {}  # by number
        self._first = 0  # number of the oldest that is there
        self._forgotten: EventId | None = None  # the one before it
        self._last = EventId(0, -1)
        self.end = 0  # number of the next
        self.bytes = 0

    def add(self, tokens: int, event: bytes) -> None:
        """Add an event, given as it would be without an id, its end included."""
        self._last = EventId(tokens, self._last.more + 1 if tokens == self._last.tokens else 0)
        data = f"id: {self._last}\n".encode() + event
        self._events[self.end] = (self._last, data)
        self.end += 1
        self.bytes += len(data)
        while self.bytes > self._max_bytes and len(self._events) > MIN_EVENTS:
            self._forgotten, oldest = self._events.pop(self._first)
            self._first += 1
            self.bytes -= len(oldest)

    def since(self, number: int) -> list[bytes] | None:
        """Return event `number` and those after it. None: it is forgotten."""
        if number < self._first:
            return None
        return [self._events[at][1] for at in range(number, self.end)]

    def number_after(self, last: EventId | None) -> int:
        """Return the number of the event that follows `last` (None: of the first).

        Raises ApiError 400 if there is no event `last`, and 410 if what follows is forgotten.
        """
        if last == self._forgotten:
            return self._first
        for number, (event_id, _) in self._events.items():
            if event_id == last:
                return number + 1
        if last is not None and (self._forgotten is None or last > self._forgotten):
            raise bad_value("last-event-id", f"this stream has no event {last}", "unknown_event")
        raise ApiError(
            410,
            f"the events after {last or 'the beginning'} are forgotten: of a stream, the latest "
            f"{self._max_bytes} bytes are kept",
            param="last-event-id",
            code="events_forgotten",
        )
