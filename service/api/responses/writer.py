"""Events as bytes: numbered from 0, each naming its response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

_encode = msgspec.json.Encoder().encode


class Event(NamedTuple):
    type: str
    data: bytes  # JSON


class EventWriter:
    def __init__(self, names: dict[str, str]) -> None:
        """`names` are in every event."""
        self._names = names
        self._number = 0

    def event(self, kind: str, **fields: Any) -> Event:
        about = {"type": kind, "sequence_number": self._number, **self._names, **fields}
        self._number += 1
        return Event(kind, _encode(about))

    def deltas(self, kind: str, **fields: Any) -> Callable[[str], Event]:
        """Makes events of more text. They are put together by hand: there is one for every token."""
        head = _encode({"type": kind, **self._names, **fields})[:-1] + b',"delta":'

        def delta(text: str) -> Event:
            data = head + _encode(text) + b',"sequence_number":%d}' % self._number
            self._number += 1
            return Event(kind, data)

        return delta
