"""The responses that run on a WebSocket, as their events tell on the way through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from quire.service.api.responses.events import error_event
from quire.service.api.responses.heads import head_of
from quire.service.api.responses.replies import ResponseFailure
from quire.service.errors import ApiError
from quire.service.router.endings import outcome_of_end
from quire.service.router.failures import Outcome

_ENDS = frozenset(f"response.{end}" for end in ("completed", "incomplete", "failed", "cancelled"))


class _Event(msgspec.Struct):
    """The fields of an event that the router looks at."""

    type: str = ""
    response_id: str | None = None
    stream_id: str | None = None
    sequence_number: int = 0
    response: dict[str, object] = {}  # as it was when the event was made


_events = msgspec.json.Decoder(_Event)


class RunningResponses:
    """Each was asked for, and has not ended; if its replica is lost, nobody but the router can end it.

    Each message but a cancel is answered once, by a response that is created or by an error: one that is
    refused counts until it is, too.
    """

    def __init__(self, note_stored: Callable[[str], None] = lambda _: None) -> None:
        """`note_stored` is told the id of each that will be stored."""
        self._note_stored = note_stored
        self._asked: Counter[str | None] = Counter()  # without an answer so far, by their stream_id
        self._created: dict[str, _Event] = {}
        self._last: dict[str, int] = {}  # number of the newest event

    def __len__(self) -> int:
        return len(self._created) + self._asked.total()

    def asks(self, text: str | None) -> bool:
        """Return whether a client's message, None if it is a binary one, is answered."""
        return head_of(text).cancelled_id is None  # a refused cancel is told by its response_id

    def ask(self, text: str | None) -> None:
        """Note that it is passed on."""
        head = head_of(text)
        if head.cancelled_id is None:
            self._asked[head.lane] += 1

    def refusal(self, text: str | None, error: ApiError) -> str:
        return error_event(error, stream_id=head_of(text).lane).data.decode()

    def note(self, text: str) -> Outcome | None:
        """Note that an event was passed on. Return how a response ended with it; None: none has."""
        event = _event(text)
        if event.type == "error":
            if event.response_id is None:
                self._settle(event.stream_id)
                return outcome_of_end(text.encode())
            return None
        if event.response_id is None:
            return None
        if event.type == "response.created":
            self._settle(event.stream_id)
            self._created[event.response_id] = event
            if event.response.get("store") is True:
                self._note_stored(event.response_id)
        if event.response_id in self._created:
            self._last[event.response_id] = event.sequence_number
        if event.type in _ENDS:
            self._created.pop(event.response_id, None)
            self._last.pop(event.response_id, None)
            return outcome_of_end(text.encode())
        return None

    def _settle(self, stream_id: str | None) -> None:
        """Note that one has begun, or is refused: replicas name its stream as the client did."""
        self._asked[stream_id] -= 1
        if self._asked[stream_id] <= 0:
            del self._asked[stream_id]

    def fail(self, error: ApiError) -> list[str]:
        """Return the last event of each, as its replica would have told it; none runs any more."""
        ends = []
        for response_id, created in self._created.items():
            end = {
                "type": "response.failed",
                "sequence_number": self._last[response_id] + 1,
                "response_id": response_id,
                "response": {**created.response, "status": "failed", "error": ResponseFailure.of(error)},
            }
            if created.stream_id is not None:
                end["stream_id"] = created.stream_id
            ends.append(msgspec.json.encode(end).decode())
        unbegun = [error_event(error, stream_id=stream_id) for stream_id in self._asked.elements()]
        self._asked.clear()
        self._created.clear()
        self._last.clear()
        return [*ends, *(event.data.decode() for event in unbegun)]

    def lose(self, error: ApiError) -> list[str]:
        """As `fail`, and an error for what was said and did not come so far."""
        return [*self.fail(error), self.refusal(None, error)]


def _event(text: str) -> _Event:
    try:
        return _events.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return _Event()
