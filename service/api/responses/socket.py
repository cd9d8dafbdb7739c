"""WS /v1/responses: several responses at once on one socket, told apart by their id."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.types import Receive, Scope, Send

from quire.service.answer.conversations import Conversations
from quire.service.api.responses.events import error_event
from quire.service.api.responses.heads import head_of
from quire.service.api.responses.protocol import ClientEvent, ResponseCancel, ResponseCreate
from quire.service.api.responses.socket_response import SocketResponse
from quire.service.api.sockets.failures import Cancelled
from quire.service.api.sockets.session import MAX_ANSWERS, SocketSession, accept, own_connection
from quire.service.errors import ApiError
from quire.service.http.codec import read
from quire.service.http.gate import note_ignored
from quire.service.state import ServerState

_decoder = msgspec.json.Decoder(ClientEvent)


class ResponsesSocket:
    """An ASGI app. Raises ApiError before the handshake's end; later, errors are events."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await accept(self._state, scope, receive, send)
        await _Talk(self._state, scope, receive, send).run()


class _Talk:
    """What one client says, and has said before."""

    def __init__(self, state: ServerState, scope: Scope, receive: Receive, send: Send) -> None:
        self._state = state
        self._scope = scope
        self._conversations = Conversations(
            state.config.max_conversation_bytes, state.conversations, scope["state"]["tenant"]
        )
        self._session: SocketSession[SocketResponse] = SocketSession(
            state, scope, receive, send, self._obey, self._refuse
        )

    async def run(self) -> None:
        try:
            await self._session.run()
        finally:
            self._conversations.close()

    def _obey(self, text: str) -> None:
        try:
            found = read(text, _decoder, ignore_unknown=self._scope["state"]["ignore_unknown"])
        except ApiError as error:
            self._refuse(error, **head_of(text).names)
            return
        if isinstance(found.body, ResponseCreate):
            self._create(found.body, found.ignored)
        else:
            self._cancel(found.body)

    def _create(self, body: ResponseCreate, ignored: Sequence[str]) -> None:
        if self._session.full:
            message = f"{MAX_ANSWERS} responses run on this WebSocket already: wait until one has ended"
            refusal = ApiError(429, message, code="too_many_responses")
            self._refuse(refusal, stream_id=body.stream_id)
            return
        connection = own_connection(self._scope)
        note_ignored(connection.scope, ignored)
        response = SocketResponse(self._state, connection, body, self._conversations, self._session.put)
        before = [
            task
            for other, task in self._session.answers.items()
            if (body.stream_id is not None and other.stream_id == body.stream_id)
            or (other.id is not None and other.id == body.previous_response_id)
        ]
        self._session.start(response, response.run(before))

    def _cancel(self, event: ResponseCancel) -> None:
        for response in self._session.answers:
            if response.id == event.response_id and not response.ended:
                response.interrupt(Cancelled())
                return
        message = f"no response {event.response_id!r} runs on this WebSocket"
        refusal = ApiError(404, message, param="response_id", code="response_not_found")
        self._refuse(refusal, response_id=event.response_id)

    def _refuse(self, error: ApiError, **names: str | None) -> None:
        self._session.say(error_event(error, **names).data)
