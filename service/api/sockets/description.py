"""The frames of the WebSockets as types, from which /openapi.json describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.service.answer.replies import (
    ChatLogprobs,
    ChatReply,
    CompletionLogprobs,
    CompletionReply,
    ReplyChoice,
    Usage,
)
from quire.service.api.responses.protocol import ResponseCancel, ResponseCreate
from quire.service.api.sockets.frames import CancelFrame, ChatFrame, CompletionFrame
from quire.service.errors import ErrorDetail
from quire.service.text.tools.calls import CallDelta

_DONE = {"const": True}
_IGNORED = "The fields of the request that had no effect, if there were any"
_HEADERS = "Those that the answer would have over HTTP, such as Retry-After"
_SEQUENCE = "From 0 on, of each response"
_TAG = "The request's, if it had one"

ReturnedTag = Annotated[str, Meta(description=_TAG)]


class ChatDelta(msgspec.Struct, kw_only=True):
    """What has come of a choice's message since its chunk before."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(ReplyChoice, kw_only=True):
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """A part of an answer, as an event of a stream has it."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    tag: ReturnedTag | UnsetType = UNSET


class CompletionChunkChoice(ReplyChoice, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None = None


class CompletionChunk(msgspec.Struct, kw_only=True):
    """A part of an answer, as an event of a stream has it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    tag: ReturnedTag | UnsetType = UNSET


class ChatReplyFrame(ChatReply, kw_only=True):
    """The whole answer, with `stream: false`."""

    tag: ReturnedTag | UnsetType = UNSET


class CompletionReplyFrame(CompletionReply, kw_only=True):
    """The whole answer, with `stream: false`."""

    tag: ReturnedTag | UnsetType = UNSET


class DoneFrame(msgspec.Struct, kw_only=True):
    """The last frame of an answer that did not fail."""

    done: Annotated[bool, Meta(extra_json_schema=_DONE)]
    cancelled: Annotated[bool, Meta(extra_json_schema=_DONE)] | UnsetType = UNSET
    ignored: Annotated[list[str], Meta(description=_IGNORED)] | UnsetType = UNSET
    tag: ReturnedTag | UnsetType = UNSET


class SocketErrorDetail(ErrorDetail, kw_only=True):
    headers: Annotated[dict[str, str], Meta(description=_HEADERS)] | UnsetType = UNSET


class ErrorFrame(msgspec.Struct, kw_only=True):
    """The last frame of an answer that failed, or was refused; or what is wrong with a cancel or a tag."""

    error: SocketErrorDetail
    tag: ReturnedTag | UnsetType = UNSET


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of the HTTP stream, with what OpenAI's events of its type have."""

    type: Annotated[str, Meta(pattern=r"^response\.")]
    sequence_number: Annotated[int, Meta(ge=0, description=_SEQUENCE)]
    response_id: str
    stream_id: str | UnsetType = UNSET
    ignored: Annotated[list[str], Meta(description=f"{_IGNORED}; of response.created")] | UnsetType = UNSET


class ResponseRefusal(msgspec.Struct, kw_only=True):
    """What was asked for is refused; the socket stays open."""

    type: Literal["error"]
    status: int
    error: SocketErrorDetail
    response_id: str | UnsetType = UNSET
    stream_id: str | UnsetType = UNSET


@dataclass(frozen=True)
class SocketDescription:
    """A WebSocket: what a client may send, and what comes back."""

    path: str
    summary: str
    client: tuple[type, ...]
    server: tuple[type, ...]


SOCKETS = (
    SocketDescription(
        "/v1/completions",
        "Completions, several at once, told apart by their tags",
        (CompletionFrame, CancelFrame),
        (CompletionChunk, CompletionReplyFrame, DoneFrame, ErrorFrame),
    ),
    SocketDescription(
        "/v1/chat/completions",
        "Answers to conversations, several at once, told apart by their tags",
        (ChatFrame, CancelFrame),
        (ChatChunk, ChatReplyFrame, DoneFrame, ErrorFrame),
    ),
    SocketDescription(
        "/v1/responses",
        "Responses, several at once, told apart by their ids",
        (ResponseCreate, ResponseCancel),
        (ResponseEvent, ResponseRefusal),
    ),
)
