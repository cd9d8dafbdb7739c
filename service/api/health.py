"""GET /health, /ready, /startup and /metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.config import Progress
from quire.service.answer.replies import Health, Readiness
from quire.service.errors import engine_dead, not_ready
from quire.service.http.codec import JsonResponse
from quire.service.http.event_stream import EventStream
from quire.service.state import ServerState


async def health(state: ServerState, request: Request) -> Response:
    """Liveness: 503 tells a supervisor to restart us."""
    engine = state.engine
    if engine is not None and engine.state == "dead":
        raise engine_dead(engine.error)
    state.watchdog.check()
    return JsonResponse(Health())


async def ready(state: ServerState, request: Request) -> Response:
    """Return whether requests would be served."""
    state.serving()
    stats = state.metrics.stats
    return JsonResponse(Readiness(graphs_left=stats.graphs_left if stats is not None else 0))


async def metrics(state: ServerState, request: Request) -> Response:
    from quire.service.metrics.exposition import exposition

    info = None if state.engine is None else state.engine.info
    accept = request.headers.get("accept", "")
    text, media_type = exposition(state.metrics, info, state.loop_watch, accept)
    return Response(text, media_type=media_type)


async def startup(state: ServerState, request: Request) -> Response:
    """Tell the start-up phases as they go, from the newest on, until the engine is up, or dead."""
    return EventStream(_phases(state), state.config, state.streams)


async def _phases(state: ServerState) -> AsyncIterator[Progress]:
    await state.engine_set.wait()
    engine = state.engine
    if engine is None:
        raise not_ready("there is no engine")
    async for progress in engine.watch_progress():
        yield progress
    if engine.state == "dead":
        raise engine_dead(engine.error)
