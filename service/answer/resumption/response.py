"""What a stream with an X-Stream-Id is answered with."""

from __future__ import annotations

import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.service.answer.resumption.recording import Recording
from quire.service.config import ServiceConfig
from quire.service.errors import ApiError
from quire.service.http.codec import error_response
from quire.service.http.connection import ClientGone, Connection
from quire.service.http.gate import note_failure

log = logging.getLogger("quire.service")


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
