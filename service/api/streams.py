"""Answers over HTTP: whole, or as a stream, which can be picked up, or stopped, at /v1/streams/{id}."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from quire.service.answer.encoder import EventEncoder
from quire.service.answer.replies import StoppedStream
from quire.service.answer.resumption.response import RecordedResponse
from quire.service.answer.resumption.ring import EventId
from quire.service.answer.stream import GenerationResponse, send_stream, whole
from quire.service.api.answers import Answer
from quire.service.errors import ApiError, bad_value
from quire.service.http.codec import JsonResponse
from quire.service.http.connection import Connection
from quire.service.http.dialects import dialect_of
from quire.service.http.framing import SSE
from quire.service.state import ServerState


def answer(state: ServerState, request: Request, own: Answer, *, streamed: bool) -> Response:
    """Return the response that streams it, or sends it whole. An X-Stream-Id makes a stream resumable.

    Takes over the generation. Raises ApiError if the header cannot be obeyed.
    """
    headers = dict(reversed(request.scope["headers"]))  # of doubled ones the first
    stream_id = headers.get(b"x-stream-id")
    framing = dialect_of(request.url.path).framing
    generation, events = own.generation, own.encoder(framing) if streamed else None
    try:
        if b"last-event-id" in headers:
            raise bad_value("last-event-id", "Last-Event-ID belongs to GET /v1/streams/{id}")
        if stream_id is None:
            return GenerationResponse(
                state.config, state.generations, generation, _steps(state, own, events), events
            )
        if events is None or framing is not SSE:
            message = "X-Stream-Id may only be given with stream: true, for a stream of server-sent events"
            raise bad_value("x-stream-id", message)
        recording = state.recordings.start(
            request.state.tenant, stream_id.decode("latin-1"), generation, events
        )
    except ApiError:
        generation.close()
        raise
    return RecordedResponse(state.config, recording)


def _steps(
    state: ServerState, own: Answer, events: EventEncoder | None
) -> Callable[[Connection], Awaitable[bytes | None]]:
    if events is None:
        return lambda _: whole(own.generation, own.reply, state.pool)
    limit = state.config.max_backlog_bytes
    return lambda connection: send_stream(connection, own.generation, events, limit)


async def recorded_stream(state: ServerState, request: Request) -> Response:
    """Answer with the stream from the event after Last-Event-ID on, or from the start; DELETE stops it."""
    stream_id = request.path_params["stream_id"]
    recording = state.recordings.find(request.state.tenant, stream_id)
    if request.method == "DELETE":
        return JsonResponse(StoppedStream(stream_id, recording.stop()))
    last = request.headers.get("last-event-id")
    number = recording.ring.number_after(None if last is None else EventId.parse(last))
    if recording.ended and number == recording.ring.end:
        return Response(status_code=204)  # by which a browser's EventSource knows that it has all
    return RecordedResponse(state.config, recording, number)
