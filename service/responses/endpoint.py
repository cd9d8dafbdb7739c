"""POST /v1/responses."""

from __future__ import annotations

from msgspec import json
from starlette.requests import Request
from starlette.responses import Response

from service.answer import answer
from service.errors import bad_value
from service.http import decode
from service.responses.events import ResponseEvents, SseEvents
from service.responses.protocol import ResponseRequest
from service.responses.replies import ResponseReply
from service.responses.response import begin
from service.state import ServerState

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

    events = SseEvents(response) if body.stream else None
    return answer(state, request, response.generation, reply=reply, events=events)
