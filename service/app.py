"""The ASGI application: which path is answered by what."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.service.api.about import About, version
from quire.service.api.anthropic.endpoint import count_tokens, messages
from quire.service.api.blocks import block_detail, block_events, block_prefixes, own_blocks
from quire.service.api.chat import chat_completions
from quire.service.api.completions import completions
from quire.service.api.health import health, metrics, ready, startup
from quire.service.api.models import detokenize, get_model, list_models, tokenize
from quire.service.api.ollama.embed import ollama_embed, ollama_embeddings
from quire.service.api.ollama.endpoint import ollama_chat, ollama_generate
from quire.service.api.ollama.models import ollama_ps, ollama_show, ollama_tags, ollama_version
from quire.service.api.pooling.classify import classify
from quire.service.api.pooling.embeddings import embeddings
from quire.service.api.pooling.scores import rerank, score
from quire.service.api.responses.endpoint import input_items, responses, stored_response
from quire.service.api.responses.socket import ResponsesSocket
from quire.service.api.sockets.endpoint import CHAT, COMPLETIONS, CompletionsSocket
from quire.service.api.streams import recorded_stream
from quire.service.api.why import why_of
from quire.service.errors import ApiError
from quire.service.http.cors import with_cors
from quire.service.http.endpoint import Counted, Endpoint, Handler
from quire.service.http.gate import Gate
from quire.service.http.static import page_files
from quire.service.state import ServerState


def create_app(state: ServerState) -> ASGIApp:
    """Answers at once; until `state` has an engine and a tokenizer the API says 503.

    A bare Router, not Starlette(): its two layers of error handling would wrap every send of a stream.
    """

    def route(path: str, handler: Handler[ServerState], *methods: str) -> Route:
        return Route(path, Counted(Endpoint(state, handler, *methods), path))

    def get(path: str, handler: Handler[ServerState]) -> Route:
        return route(path, handler, "GET")

    def post(path: str, handler: Handler[ServerState]) -> Route:
        return route(path, handler, "POST")

    def socket(path: str, app: ASGIApp) -> WebSocketRoute:
        return WebSocketRoute(path, Counted(app, path))

    about = About()
    public = [
        get("/health", health),
        get("/ready", ready),
        get("/startup", startup),
        get("/metrics", metrics),
        get("/openapi.json", about.openapi),
        get("/docs", about.docs),
        get("/version", version),
        *(get(path, handler) for path, handler in page_files()),
    ]
    keyed: list[Route | WebSocketRoute] = [
        post("/v1/completions", completions),
        socket("/v1/completions", CompletionsSocket(state, COMPLETIONS)),
        post("/v1/chat/completions", chat_completions),
        socket("/v1/chat/completions", CompletionsSocket(state, CHAT)),
        post("/v1/responses", responses),
        post("/v1/messages", messages),
        post("/v1/messages/count_tokens", count_tokens),
        route("/v1/responses/{response_id}", stored_response, "GET", "DELETE"),
        get("/v1/responses/{response_id}/input_items", input_items),
        socket("/v1/responses", ResponsesSocket(state)),
        post("/api/chat", ollama_chat),
        post("/api/generate", ollama_generate),
        post("/v1/embeddings", embeddings),
        *(post(path, rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        *(post(path, score) for path in ("/v1/score", "/score")),
        post("/classify", classify),
        post("/api/embed", ollama_embed),
        post("/api/embeddings", ollama_embeddings),
        post("/api/show", ollama_show),
        get("/api/tags", ollama_tags),
        get("/api/ps", ollama_ps),
        get("/api/version", ollama_version),
        route("/v1/streams/{stream_id}", recorded_stream, "GET", "DELETE"),
        get("/v1/requests/{request_id}/why", why_of),
        get("/v1/models", list_models),
        get("/v1/models/{name:path}", get_model),
        get("/v1/blocks/events", block_events),
        get("/v1/blocks/own", own_blocks),
        get("/v1/blocks/prefixes", block_prefixes),
        get("/v1/blocks/{tier}/{block}", block_detail),
        post("/v1/lab/pools", _begin_lab),
        post("/v1/lab/pools/{pool_id}", _step_lab),
        post("/tokenize", tokenize),
        post("/detokenize", detokenize),
    ]
    paths = frozenset(route.path for route in keyed)

    async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
        raise ApiError(404, f"there is no {scope['path']}{_hint(scope['path'], paths)}")

    no_ids = [
        Route(path, Counted(not_found, path))
        for path in ("/v1/responses/compact", "/v1/responses/input_tokens")
    ]
    router = Router([*no_ids, *keyed, *public], redirect_slashes=False, default=not_found)
    open_paths = frozenset(route.path for route in public)
    gate = Gate(router, state.config, open_paths, state.keys, state.metrics.answered)
    return with_cors(gate, state.config.cors_origins)


def _hint(path: str, paths: frozenset[str]) -> str:
    """Return what base URL may be meant: OpenAI's clients need /v1 at its end, and Anthropic's add it."""
    longer, shorter = f"/v1{path}", path.removeprefix("/v1")
    if longer in paths:
        return f", but {longer}: the base URL must end with /v1"
    return f", but {shorter}: the base URL must end before /v1" if shorter in paths else ""


# The lab takes parts of the engine, whose imports a server that is about to listen does not wait for.


async def _begin_lab(state: ServerState, request: Request) -> Response:
    from quire.service.api.lab import begin_lab

    return await begin_lab(state, request)


async def _step_lab(state: ServerState, request: Request) -> Response:
    from quire.service.api.lab import step_lab

    return await step_lab(state, request)
