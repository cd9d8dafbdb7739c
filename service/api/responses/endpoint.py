"""POST /v1/responses."""

from __future__ import annotations

from msgspec import json
from starlette.requests import Request
from starlette.responses import Response

from quire.service.api.answers import Answer
from quire.service.api.responses.events import ResponseEncoder, ResponseEvents
from quire.service.api.responses.protocol import ResponseRequest
from quire.service.api.responses.replies import ResponseReply
from quire.service.api.responses.response import begin
from quire.service.api.streams import answer
from quire.service.errors import bad_value
from quire.service.http.codec import decode
from quire.service.http.framing import Framing
from quire.service.state import ServerState

_decoder = json.Decoder(ResponseRequest)


async def responses(state: ServerState, request: Request) -> Response:
    state.serving()
    body = await decode(request, _decoder)
    if body.previous_response_id is not None:
        raise bad_value(
            "previous_response_id",
            "previous_response_id works on a WebSocket only: over HTTP responses are not kept, so send the "
            "whole conversation as input",
        )
    response = await begin(state, request, body, history=[])

    def reply() -> ResponseReply:
        ResponseEvents(response).finish()  # which builds the output
        return response.snapshot(response.final_status)

    def encoder(framing: Framing) -> ResponseEncoder:
        return ResponseEncoder(response, framing)

    own = Answer(response.generation, reply, encoder)
    return answer(state, request, own, streamed=bool(body.stream))
