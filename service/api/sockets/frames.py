"""The frames of WS /v1/completions and /v1/chat/completions, each a JSON object.

A client's is the body that it would POST, or cancels an answer. A server's is a chunk or a whole reply, or
ends an answer: by `done` or by `error`. All of an answer's frames have its tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta

from quire.service.answer.encoder import DONE
from quire.service.api.requests.chat import ChatRequest
from quire.service.api.requests.completions import CompletionRequest
from quire.service.errors import ApiError

MAX_TAG = 64  # characters
TAG_IN_USE = "tag_in_use"

_TAG = "Told back in every frame of the answer; those without one are answered one after another"
_STREAM = "true if left out"

Tag = Annotated[str, Meta(max_length=MAX_TAG, description=_TAG)]
Streamed = Annotated[bool, Meta(description=_STREAM)]

_encode = msgspec.json.Encoder().encode


class CompletionFrame(CompletionRequest, kw_only=True, forbid_unknown_fields=True):
    """As it is POSTed, but streamed unless it says otherwise."""

    stream: Streamed | None = True
    tag: Tag | None = None

    def __post_init__(self) -> None:
        self.stream = self.stream is not False
        super().__post_init__()


class ChatFrame(ChatRequest, kw_only=True, forbid_unknown_fields=True):
    """As it is POSTed, but streamed unless it says otherwise."""

    stream: Streamed | None = True
    tag: Tag | None = None

    def __post_init__(self) -> None:
        self.stream = self.stream is not False
        super().__post_init__()


class CancelFrame(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    cancel: Tag


class Head(msgspec.Struct):
    """The fields by which a client's frame is known before it is read: none of them need be right."""

    cancel: msgspec.Raw | msgspec.UnsetType = UNSET
    tag: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def cancels(self) -> bool:
        return self.cancel is not UNSET

    def readable_tag(self) -> str | None:
        """Return the tag; None if there is none, or what is there can be no tag."""
        try:
            return msgspec.json.decode(self.tag, type=Tag | None)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None


heads = msgspec.json.Decoder(Head)


class _Error(msgspec.Struct):
    param: str | None = None
    code: str | None = None


class Tail(msgspec.Struct):
    """The fields by which a server's frame ends an answer."""

    tag: str | None = None
    done: bool = False
    error: _Error | None = None

    @property
    def ends(self) -> bool:
        """Return whether it ends one: not an error of a cancel, or of a tag in use, whose answer goes on."""
        if self.error is None:
            return self.done
        return self.error.param != "cancel" and self.error.code != TAG_IN_USE


tails = msgspec.json.Decoder(Tail)


def tagged(message: bytes, tag: str | None) -> bytes:
    """Return a JSON object with the tag in front of its fields."""
    return message if tag is None else b'{"tag":' + _encode(tag) + b"," + message[1:]


def from_stream(message: bytes, tag: str | None, ignored: Sequence[str] = ()) -> bytes:
    """Return the frame of a stream's message; the last one names fields of the request without effect."""
    return done(tag, ignored) if message == DONE else tagged(message, tag)


def done(tag: str | None, ignored: Sequence[str] = ()) -> bytes:
    names = b',"ignored":' + _encode(list(dict.fromkeys(ignored))) if ignored else b""
    return tagged(b'{"done":true' + names + b"}", tag)


def cancelled(tag: str | None) -> bytes:
    return tagged(b'{"done":true,"cancelled":true}', tag)


def failed(error: ApiError, tag: str | None = None) -> bytes:
    """Return the frame of an error, with the headers that it would have over HTTP."""
    detail: dict[str, Any] = msgspec.structs.asdict(error.detail)
    if error.headers:
        detail["headers"] = error.headers
    return tagged(_encode({"error": detail}), tag)
