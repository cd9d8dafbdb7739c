"""The fields by which a client's message on WS /v1/responses is known before it is read."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from quire.service.api.responses.protocol import Identifier, StreamId

_NULL = msgspec.Raw(b"null")

T = TypeVar("T")


class Head(msgspec.Struct):
    """None of them need be right."""

    type: msgspec.Raw = _NULL
    stream_id: msgspec.Raw = _NULL
    response_id: msgspec.Raw = _NULL
    previous_response_id: msgspec.Raw = _NULL

    @property
    def cancelled_id(self) -> str | None:
        """Return the response that the message cancels, if it is a cancel that names one."""
        cancels = _readable(self.type, str) == "response.cancel"
        return _readable(self.response_id, Identifier) if cancels else None

    @property
    def previous_id(self) -> str | None:
        """Return the response that the message goes on from, if it names one."""
        return _readable(self.previous_response_id, Identifier)

    @property
    def lane(self) -> str | None:
        """Return its stream_id. None if there is none, or what is there can be none."""
        return _readable(self.stream_id, StreamId)

    @property
    def names(self) -> dict[str, str | None]:
        """Return what a refusal of the message is to name."""
        cancelled_id = self.cancelled_id
        return {"stream_id": self.lane} if cancelled_id is None else {"response_id": cancelled_id}


_heads = msgspec.json.Decoder(Head)


def head_of(text: str | None) -> Head:
    """Return the head of a text frame, or of a binary one, which is None; of one without, an empty one."""
    try:
        return Head() if text is None else _heads.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return Head()


def _readable(value: msgspec.Raw, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
