"""WS /v1/completions and /v1/chat/completions: several answers at once on one socket, told apart by tags."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, NoReturn, TypeVar

import msgspec
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from quire.service.api import chat, completions
from quire.service.api.answers import Answer
from quire.service.api.sockets.answer import TaggedAnswer
from quire.service.api.sockets.failures import Cancelled
from quire.service.api.sockets.frames import (
    TAG_IN_USE,
    CancelFrame,
    ChatFrame,
    CompletionFrame,
    failed,
    heads,
)
from quire.service.api.sockets.session import MAX_ANSWERS, SocketSession, accept, own_connection
from quire.service.errors import ApiError, bad_value
from quire.service.http.codec import parse, read
from quire.service.http.gate import note_ignored
from quire.service.state import ServerState

_cancels = msgspec.json.Decoder(CancelFrame)

Frame = TypeVar("Frame", bound=CompletionFrame | ChatFrame)


@dataclass(frozen=True)
class Kind(Generic[Frame]):
    """How frames are read, and what hands one to the engine."""

    decoder: msgspec.json.Decoder[Frame]
    begin: Callable[[ServerState, HTTPConnection, Frame], Awaitable[Answer]]


COMPLETIONS = Kind(msgspec.json.Decoder(CompletionFrame), completions.begin)
CHAT = Kind(msgspec.json.Decoder(ChatFrame), chat.begin)


class CompletionsSocket(Generic[Frame]):
    """An ASGI app. Raises ApiError before the handshake's end; later, errors are frames."""

    def __init__(self, state: ServerState, kind: Kind[Frame]) -> None:
        self._state = state
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await accept(self._state, scope, receive, send)
        await _Talk(self._state, self._kind, scope, receive, send).session.run()


class _Talk(Generic[Frame]):
    """What one client says.

    Each frame but a cancel is answered, ones that are refused too. Those without a tag are answered one after
    another, so that their answers are told apart by their order.
    """

    def __init__(
        self, state: ServerState, kind: Kind[Frame], scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._state = state
        self._kind = kind
        self._scope = scope
        self.session: SocketSession[TaggedAnswer] = SocketSession(
            state, scope, receive, send, self._obey, self._refuse
        )

    def _obey(self, text: str) -> None:
        head = parse(text, heads)
        if head.cancels:
            self._cancel(text)
            return
        tag = head.readable_tag()
        if tag is not None and any(answer.tag == tag for answer in self.session.answers):
            message = (
                f"an answer with the tag {tag!r} runs on this WebSocket: wait for its end, or use another"
            )
            self.session.say(failed(bad_value("tag", message, TAG_IN_USE)))
            return
        connection = own_connection(self._scope)
        try:
            found = read(text, self._kind.decoder, ignore_unknown=connection.state.ignore_unknown)
        except ApiError as error:
            self._refuse(error, tag)
            return
        note_ignored(connection.scope, found.ignored)
        begin = partial(self._kind.begin, self._state, connection, found.body)
        self._answer(begin, connection, tag, streamed=bool(found.body.stream))

    def _cancel(self, text: str) -> None:
        try:
            tag = parse(text, _cancels).cancel
        except ApiError as error:
            self.session.say(failed(bad_value("cancel", error.message, error.code)))
            return
        for answer in self.session.answers:
            if answer.tag == tag and not answer.ended:
                answer.interrupt(Cancelled())
                return
        message = f"no answer with the tag {tag!r} runs on this WebSocket"
        self.session.say(failed(ApiError(404, message, param="cancel", code="unknown_tag")))

    def _refuse(self, error: ApiError, tag: str | None = None) -> None:
        """Answer a frame with the error, when it is its turn."""

        async def begin() -> NoReturn:
            raise error

        self._answer(begin, own_connection(self._scope), tag, streamed=True)

    def _answer(
        self,
        begin: Callable[[], Awaitable[Answer]],
        connection: HTTPConnection,
        tag: str | None,
        *,
        streamed: bool,
    ) -> None:
        if self.session.full:
            message = f"{MAX_ANSWERS} answers run on this WebSocket already: wait until one has ended"
            self.session.say(failed(ApiError(429, message, code="too_many_answers"), tag))
            return
        answer = TaggedAnswer(self._state, connection, tag, begin, self.session.put, streamed=streamed)
        before = [task for other, task in self.session.answers.items() if tag is None and other.tag is None]
        self.session.start(answer, answer.run(before))
