"""The event that ends a stream on its way through, and what it says of the replica."""

from __future__ import annotations

import msgspec

from quire.service.errors import ENGINE_DEAD
from quire.service.http.framing import LINES

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
_MARK = f'"{ENGINE_DEAD}"'.encode()  # inside a JSON string its quotes would be escaped


class EngineDied(Exception):
    """A replica says that its engine died, and so did its answers."""


class _Error(msgspec.Struct):
    code: str | None = None
    cause: str | None = None  # of a response's failure, whose code is OpenAI's


class _Response(msgspec.Struct):
    error: _Error | None = None


class _Failure(msgspec.Struct):
    """An error's event or body, or a response that failed."""

    error: _Error | None = None
    response: _Response | None = None


class _Line(msgspec.Struct):
    done: bool = False


_failures = msgspec.json.Decoder(_Failure)
_lines = msgspec.json.Decoder(_Line)


def split_last(events: bytes, mark: bytes) -> tuple[bytes, bytes]:
    """Return whole events, each of which ends with `mark`, as all but the last, and the last one."""
    begin = events.rfind(mark, 0, -len(mark)) + len(mark)
    return (events[:begin], events[begin:]) if begin >= len(mark) else (b"", events)


def is_last(event: bytes, mark: bytes) -> bool:
    """Whether nothing may follow it in its stream."""
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
    """Whether a last event, a frame or a body says that the replica's engine died."""
    if _MARK not in message:
        return False
    try:
        failure = _failures.decode(message[max(0, message.find(b"{")) :].rstrip())
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    error = failure.error if failure.response is None else failure.response.error
    return error is not None and ENGINE_DEAD in (error.code, error.cause)


def _is_done(line: bytes) -> bool:
    try:
        return _lines.decode(line).done
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
