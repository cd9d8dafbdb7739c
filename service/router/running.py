"""The responses that run on a WebSocket, as their events tell on the way through."""

from __future__ import annotations

import msgspec

from quire.service.api.responses.events import error_event
from quire.service.errors import ApiError

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
    """Each has begun, and not ended; if its replica is lost, nobody but the router can end it."""

    def __init__(self) -> None:
        self._created: dict[str, _Event] = {}
        self._last: dict[str, int] = {}  # number of the newest event

    def __len__(self) -> int:
        return len(self._created)

    def asks(self, text: str | None) -> bool:
        """Whether a client's message wants a response."""
        return text is not None and _event(text).type == "response.create"

    def ask(self, text: str | None) -> None:
        """It is passed on: what comes of it, events tell."""

    def refusal(self, text: str | None, error: ApiError) -> str:
        return error_event(error).data.decode()

    def note(self, text: str) -> None:
        """An event was passed on."""
        event = _event(text)
        if event.response_id is None:
            return
        if event.type == "response.created":
            self._created[event.response_id] = event
        if event.response_id in self._created:
            self._last[event.response_id] = event.sequence_number
        if event.type in _ENDS:
            self._created.pop(event.response_id, None)
            self._last.pop(event.response_id, None)

    def fail(self, error: ApiError) -> list[str]:
        """The last event of each, as its replica would have told it; none runs any more."""
        ends = []
        for response_id, created in self._created.items():
            failure = {"code": "server_error", "message": error.message}
            end = {
                "type": "response.failed",
                "sequence_number": self._last[response_id] + 1,
                "response_id": response_id,
                "response": {**created.response, "status": "failed", "error": failure},
            }
            if created.stream_id is not None:
                end["stream_id"] = created.stream_id
            ends.append(msgspec.json.encode(end).decode())
        self._created.clear()
        self._last.clear()
        return ends

    def lose(self, error: ApiError) -> list[str]:
        """As `fail`, and an error for what had not begun yet."""
        return [*self.fail(error), self.refusal(None, error)]


def _event(text: str) -> _Event:
    try:
        return _events.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return _Event()
