"""GET /v1/streams/{id}, and what a stream with an X-Stream-Id is answered with."""

from __future__ import annotations

import logging

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.service.answer.resumption.recording import Recording
from quire.service.answer.resumption.ring import EventId
from quire.service.config import ServiceConfig
from quire.service.errors import ApiError
from quire.service.http.codec import error_response
from quire.service.http.connection import ClientGone, Connection
from quire.service.http.gate import note_failure
from quire.service.state import ServerState

log = logging.getLogger("quire.service")


async def pick_up(state: ServerState, request: Request) -> Response:
    """From the event after Last-Event-ID on, or from the beginning."""
    if request.method != "GET":
        raise ApiError(405, "a stream can be read with GET only", allow="GET")
    recording = state.recordings.find(request.state.tenant, request.path_params["stream_id"])
    last = request.headers.get("last-event-id")
    number = recording.ring.number_after(None if last is None else EventId.parse(last))
    if recording.ended and number == recording.ring.end:
        return Response(status_code=204)  # by which a browser's EventSource knows that it has all
    return RecordedResponse(state.config, recording, number)


class RecordedResponse(Response):
    """Reads a recording from event `number` on. The recording goes on when the client leaves."""

    def __init__(self, config: ServiceConfig, recording: Recording, number: int = 0) -> None:
        self._config = config
        self._recording = recording
        self._number = number

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(scope, send, self._config)
        try:
            async with connection:
                connection.keep_alive()
                await self._recording.read(connection, self._number)
        except ClientGone as gone:
            log.info("stream left: %s", gone)
        except ApiError as error:
            if connection.started:
                await connection.finish_late(error.event())
            else:
                await error_response(error)(scope, receive, send)
        finally:
            if self._recording.failure is not None:
                note_failure(scope, *self._recording.failure)
