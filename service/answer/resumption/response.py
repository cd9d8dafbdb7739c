"""A stream with an X-Stream-Id, as one of its readers gets it."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.service.answer.resumption.recording import Recording
from quire.service.answer.stream import failure_of
from quire.service.config import ServiceConfig
from quire.service.http.access_line import note_cost, note_failure
from quire.service.http.connection import Connection
from quire.service.http.dialects import dialect_of


class RecordedResponse(Response):
    """Reads a recording from event `number` on. The recording goes on when the client leaves."""

    def __init__(self, config: ServiceConfig, recording: Recording, number: int = 0) -> None:
        self._config = config
        self._recording = recording
        self._number = number

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(scope, send, self._config)
        error = await failure_of(connection, self._recording.read(connection, self._number))
        if self._recording.cost is not None:
            note_cost(scope, self._recording.cost)
        if self._recording.failure is not None:
            note_failure(scope, *self._recording.failure)
        if error is not None:
            await connection.fail(error, dialect_of(scope["path"]).failure(error))
