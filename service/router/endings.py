"""The event that ends a stream on its way through, and what it says of the replica."""

from __future__ import annotations

import re

import msgspec

from quire.service.errors import ENGINE_DEAD, ENGINE_STALLED
from quire.service.http.framing import LINES
from quire.service.router.failures import Outcome

# Of those that have a name; others are known by what they say.
_NAMES = frozenset(
    {
        b"response.completed",
        b"response.incomplete",
        b"response.failed",
        b"response.cancelled",
        b"message_stop",
        b"error",
    }
)
_NAME, _DATA, _ERROR = b"event: ", b"data: ", b'{"error":'
_NAMED = re.compile(rb"%b(?:%b)\n" % (_NAME, b"|".join(map(re.escape, sorted(_NAMES)))))
_FAULTS = frozenset({ENGINE_DEAD, ENGINE_STALLED, "engine_error", "internal_error"})
_FAULTY_TYPES = frozenset({"server_error", "api_error"})  # OpenAI's word for a status 500, and Anthropic's
# Older replicas send no code with Anthropic's errors: theirs is of a stalled engine, or of a replica that
# drains, which gets nothing more anyway.
_FAULTY_WITHOUT_CODE = _FAULTY_TYPES | {"overloaded_error"}
_MARK = f'"{ENGINE_DEAD}"'.encode()  # inside a JSON string its quotes would be escaped


class EngineDied(Exception):
    """A replica says that its engine died, and so did its answers."""


class BadAnswer(Exception):
    """A replica's answer is none that can be passed on."""


class _Error(msgspec.Struct):
    type: str | None = None
    code: str | None = None
    cause: str | None = None  # of a response's failure, whose code is OpenAI's

    @property
    def is_fault(self) -> bool:
        """Return whether it is the replica's fault."""
        if self.code is None:
            return self.type in _FAULTY_WITHOUT_CODE
        if self.code in _FAULTS or self.cause in _FAULTS or self.type in _FAULTY_TYPES:
            return True
        return self.code == "server_error" and self.cause is None


class _Response(msgspec.Struct):
    error: _Error | None = None


class _Failure(msgspec.Struct):
    """An error's event or body, or a response that failed."""

    error: _Error | str | None = None  # Ollama's is a message, beside which its code stands
    code: str | None = None
    response: _Response | None = None

    @property
    def told(self) -> _Error | None:
        if self.response is not None:
            return self.response.error
        if isinstance(self.error, str):
            # Older replicas send no code: what is its client's fault is refused before a stream begins.
            return _Error(code=self.code or "internal_error")
        return self.error


class _Line(msgspec.Struct):
    done: bool = False


_failures = msgspec.json.Decoder(_Failure)
_lines = msgspec.json.Decoder(_Line)


def split_at_last(events: bytes, mark: bytes) -> tuple[bytes, bytes]:
    """Return the events before the first after which nothing may follow in their stream, and that one.

    Each ends with `mark`. Without such a one all are before it. Several that show no sign of it are not
    looked at one by one.
    """
    if events.index(mark) + len(mark) == len(events):
        return (b"", events) if is_last(events, mark) else (events, b"")
    if not _may_end(events, mark):
        return events, b""
    begin = 0
    while begin < len(events):
        end = events.index(mark, begin) + len(mark)
        if is_last(events[begin:end], mark):
            return events[:begin], events[begin:end]
        begin = end
    return events, b""


def _may_end(events: bytes, mark: bytes) -> bool:
    """Return whether one of them may be the last of its stream: not if none has what is_last looks for."""
    if mark == LINES.after:
        return b'"done":true' in events or _ERROR in events
    return b"data: [DONE]" in events or b'data: {"error":' in events or _NAMED.search(events) is not None


def is_last(event: bytes, mark: bytes) -> bool:
    """Return whether nothing may follow it in its stream."""
    if mark == LINES.after:
        return event.startswith(_ERROR) or (b'"done":true' in event and _is_done(event))
    name = b""
    for line in event.split(b"\n"):
        if line.startswith(_NAME):
            name = line[len(_NAME) :]
        elif line.startswith(_DATA):
            return name in _NAMES or line == b"data: [DONE]" or line.startswith(_ERROR, len(_DATA))
    return False


def tells_of_death(message: bytes) -> bool:
    """Return whether a last event, a frame or a body says that the replica's engine died."""
    failure = _failure(message) if _MARK in message else None
    error = None if failure is None else failure.told
    return error is not None and ENGINE_DEAD in (error.code, error.cause)


def outcome_of_end(message: bytes) -> Outcome:
    """Return how a request fared whose last event, or frame, this is."""
    if b'"error":' not in message:
        return "answered"
    failure = _failure(message)
    if failure is None:
        return "refused"
    error = failure.told
    if error is None:
        return "answered"
    return "failed" if error.is_fault else "refused"


def _failure(message: bytes) -> _Failure | None:
    try:
        return _failures.decode(message[max(0, message.find(b"{")) :].rstrip())
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _is_done(line: bytes) -> bool:
    try:
        return _lines.decode(line).done
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
