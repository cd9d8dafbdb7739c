"""The router's ASGI application: its own health and metrics, and all else passed on."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.service.errors import ApiError
from quire.service.http.codec import JsonResponse
from quire.service.http.cors import with_cors
from quire.service.http.endpoint import READING, Endpoint, check_method
from quire.service.http.gate import Gate
from quire.service.http.static import page_files
from quire.service.router.forward import Forward
from quire.service.router.state import RouterState
from quire.service.router.websocket import Tunnel

PUBLIC_OF_REPLICAS = ("/startup", "/openapi.json", "/docs", "/version")


def create_app(state: RouterState) -> ASGIApp:
    """Answers at once; until there are replicas, what is theirs is answered with 503."""

    own = {"/health": health, "/ready": ready, "/metrics": metrics}
    routes = [Route(path, Endpoint(state, handler, "GET")) for path, handler in own.items()]
    public = {*(route.path for route in routes), *PUBLIC_OF_REPLICAS, *(path for path, _ in page_files())}
    forward, tunnel = Forward(state), Tunnel(state)

    async def pass_on(scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith("/"):  # `OPTIONS *`: there is no such address at a replica
            raise ApiError(404, f"there is no {scope['path']}")
        if scope["type"] == "websocket":
            await tunnel(scope, receive, send)
        elif scope["path"] in public:  # nobody without a key may have a body held
            check_method(scope, READING)
            await forward.without_body(scope, receive, send)
        else:
            await forward(scope, receive, send)

    router = Router(routes, redirect_slashes=False, default=pass_on)
    return with_cors(Gate(router, state.config, frozenset(public), state.keys), state.config.cors_origins)


async def health(state: RouterState, request: Request) -> Response:
    """Liveness: that this is answered says it all."""
    return JsonResponse({"status": "ok"})


async def ready(state: RouterState, request: Request) -> Response:
    """Return whether requests would be answered."""
    state.check_ready()
    return JsonResponse({"status": "ready"})


async def metrics(state: RouterState, request: Request) -> Response:
    from quire.service.router.exposition import exposition

    text, media_type = exposition(state, request.headers.get("accept", ""))
    return Response(text, media_type=media_type)
