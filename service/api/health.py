"""GET /health, /ready, /startup and /metrics."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.service.answer.replies import Health, Readiness
from quire.service.errors import ApiError, not_ready
from quire.service.http.codec import JsonResponse, error_response
from quire.service.http.connection import ClientGone, Connection
from quire.service.state import ServerState


async def health(state: ServerState, request: Request) -> Response:
    """Liveness: 503 tells a supervisor to restart us."""
    engine = state.engine
    if engine is not None and engine.state == "dead":
        raise ApiError(503, f"the engine died: {engine.error}", code="engine_dead")
    state.watchdog.check()
    return JsonResponse(Health())


async def ready(state: ServerState, request: Request) -> Response:
    """Whether requests would be served."""
    state.serving()
    stats = state.metrics.stats
    return JsonResponse(Readiness(graphs_left=stats.graphs_left if stats is not None else 0))


async def metrics(state: ServerState, request: Request) -> Response:
    from quire.service.metrics.exposition import exposition

    return Response(
        exposition(state.metrics, state.loop_watch), media_type="text/plain; version=0.0.4; charset=utf-8"
    )


async def startup(state: ServerState, request: Request) -> Response:
    return _StartupStream(state)


class _StartupStream(Response):
    """The start-up phases as they go, from the newest on; it ends when the engine is up, or dead."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(scope, send, self._state.config)
        self._state.streams.add(connection)
        error = None
        try:
            async with connection:
                connection.keep_alive()
                await self._follow(connection)
        except ClientGone:
            return
        except ApiError as failure:
            error = failure
        finally:
            self._state.streams.discard(connection)
        if error is not None and connection.started:
            await connection.finish_late(error.event())
        elif error is not None:
            await error_response(error)(scope, receive, send)

    async def _follow(self, connection: Connection) -> None:
        state = self._state
        await state.engine_set.wait()
        engine = state.engine
        if engine is None:
            raise not_ready("there is no engine")
        async for progress in engine.watch_progress():
            await connection.write(b"data: " + msgspec.json.encode(progress) + b"\n\n")
        if engine.state == "dead":
            raise ApiError(503, f"the engine died: {engine.error}", code="engine_dead")
        await connection.finish()
