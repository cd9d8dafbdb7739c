"""How an answer on a WebSocket fails: by its client's wish, or as a line of the log says."""

from __future__ import annotations

import logging

from starlette.requests import HTTPConnection

from quire.service.answer.generation import Generation
from quire.service.errors import ApiError

log = logging.getLogger("quire.service")


class Cancelled(ApiError):
    """The client wants no more of an answer."""

    def __init__(self) -> None:
        super().__init__(499, "the client cancelled it")


def log_failure(
    connection: HTTPConnection, name: str, answer: dict[str, str], generation: Generation, error: ApiError
) -> None:
    """As the line of an HTTP request says it; a socket's own has room for one failure only.

    `answer` has what the answer goes by, in the line's fields.
    """
    log.info(
        "%s of a WebSocket failed",
        name,
        extra={
            "request_id": connection.state.request_id.decode(),
            **answer,
            "error": error.code,
            "engine_requests": generation.engine_requests,
        },
    )
