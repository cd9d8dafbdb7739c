"""POST /v1/responses; GET and DELETE of those that were stored, and GET of their input."""

from __future__ import annotations

import asyncio

from msgspec import json
from starlette.requests import Request
from starlette.responses import Response

from quire.service.answer.history import History
from quire.service.api.answers import Answer
from quire.service.api.responses.events import ResponseEncoder, ResponseEvents
from quire.service.api.responses.input_items import INCLUDE, Page, page_of
from quire.service.api.responses.protocol import ResponseRequest
from quire.service.api.responses.replies import DeletedResponse, ResponseReply
from quire.service.api.responses.response import begin
from quire.service.api.streams import answer
from quire.service.errors import bad_value
from quire.service.http.codec import JsonResponse, decode
from quire.service.http.framing import Framing
from quire.service.state import ServerState

_decoder = json.Decoder(ResponseRequest)
_OF_STREAMS = ("stream", "include_obfuscation", "starting_after")
_NO_STREAM = (("stream", "false"), ("include_obfuscation", "false"))


async def responses(state: ServerState, request: Request) -> Response:
    state.generating()
    body = await decode(request, _decoder)
    previous, tenant = body.previous_response_id, request.state.tenant
    history = History() if previous is None else await state.responses.history(tenant, previous)
    response = await begin(state, request, body, history)
    loop = asyncio.get_running_loop()

    def keep(reply: ResponseReply) -> None:
        """Store it; from any thread."""
        if body.is_stored:
            loop.call_soon_threadsafe(state.responses.keep, tenant, response.id, response.stored(reply))

    def reply() -> ResponseReply:
        ResponseEvents(response).finish()  # which builds the output
        whole = response.snapshot(response.final_status)
        keep(whole)
        return whole

    def encoder(framing: Framing) -> ResponseEncoder:
        return ResponseEncoder(response, framing, keep)

    own = Answer(response.generation, reply, encoder)
    return answer(state, request, own, streamed=bool(body.stream))


async def stored_response(state: ServerState, request: Request) -> Response:
    """Return it as it was answered; or delete it."""
    tenant, response_id = request.state.tenant, request.path_params["response_id"]
    if request.method == "DELETE":
        await state.responses.delete(tenant, response_id)
        return JsonResponse(DeletedResponse(response_id))
    for name, value in request.query_params.multi_items():
        _check_parameter(name, value)
    found = await state.responses.find(tenant, response_id)
    return Response(found.reply, media_type="application/json")


def _check_parameter(name: str, value: str) -> None:
    """Raises ApiError 400 unless it asks for the response as it was answered, whole."""
    if name in INCLUDE or (name, value) in _NO_STREAM:
        return
    message = f"{name} is no parameter of a stored response: they are include, and stream if it is false"
    if name in _OF_STREAMS:
        message = f"{name} is not supported here: a stream can be picked up at GET /v1/streams/{{id}}"
    raise bad_value(name, message, "unknown_field")


async def input_items(state: ServerState, request: Request) -> Response:
    """Return what was said up to a stored response, a page of it."""
    page = Page.of(request.query_params.multi_items())
    tenant = request.state.tenant
    response = await state.responses.find(tenant, request.path_params["response_id"])
    return JsonResponse(await page_of(state.responses, tenant, response, page))
