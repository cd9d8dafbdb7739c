"""The ASGI application: which path is answered by what."""

from __future__ import annotations

from starlette.routing import Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.service.api.about import docs, openapi, version
from quire.service.api.chat import chat_completions
from quire.service.api.completions import completions
from quire.service.api.health import health, metrics, ready, startup
from quire.service.api.models import detokenize, get_model, list_models, tokenize
from quire.service.api.responses.endpoint import responses
from quire.service.api.responses.socket import ResponsesSocket
from quire.service.api.streams import pick_up
from quire.service.errors import ApiError
from quire.service.http.cors import with_cors
from quire.service.http.endpoint import Endpoint, Handler
from quire.service.http.gate import Gate
from quire.service.http.static import page_files
from quire.service.state import ServerState


def create_app(state: ServerState) -> ASGIApp:
    """Answers at once; until `state` has an engine and a tokenizer the API says 503.

    A bare Router, not Starlette(): its two layers of error handling would wrap every send of a stream.
    """

    def get(path: str, handler: Handler[ServerState]) -> Route:
        return Route(path, Endpoint(state, handler, "GET"))

    def post(path: str, handler: Handler[ServerState]) -> Route:
        return Route(path, Endpoint(state, handler, "POST"))

    public = [
        get("/health", health),
        get("/ready", ready),
        get("/startup", startup),
        get("/metrics", metrics),
        get("/openapi.json", openapi),
        get("/docs", docs),
        get("/version", version),
        *(get(path, handler) for path, handler in page_files()),
    ]
    keyed = [
        post("/v1/completions", completions),
        post("/v1/chat/completions", chat_completions),
        post("/v1/responses", responses),
        WebSocketRoute("/v1/responses", ResponsesSocket(state)),
        get("/v1/streams/{stream_id}", pick_up),
        get("/v1/models", list_models),
        get("/v1/models/{name:path}", get_model),
        post("/tokenize", tokenize),
        post("/detokenize", detokenize),
    ]
    router = Router([*keyed, *public], redirect_slashes=False, default=_not_found)
    gate = Gate(router, state.config, frozenset(route.path for route in public), state.keys)
    return with_cors(gate, state.config.cors_origins)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise ApiError(404, f"there is no {scope['path']}")
