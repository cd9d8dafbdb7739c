"""The ASGI application: which path is answered by what."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from service.auth import Gate
from service.chat import chat_completions
from service.completions import completions
from service.errors import ApiError
from service.health import health, metrics, ready, startup
from service.http import JsonResponse, error_response
from service.models import detokenize, get_model, list_models, tokenize
from service.openapi import describe
from service.state import ServerState
from service.static import page_routes


def create_app(state: ServerState) -> ASGIApp:
    """Answers at once; until `state` has an engine and a tokenizer the API says 503."""
    pages = page_routes()
    public = [
        Route("/health", health),
        Route("/ready", ready),
        Route("/startup", startup),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
        *pages,
    ]
    keyed = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", get_model),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]
    app = Starlette(
        routes=[*public, *keyed],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _failure},
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return Gate(app, state.config, frozenset(route.path for route in public))


async def openapi(request: Request) -> Response:
    try:
        number = version("quire")
    except PackageNotFoundError:  # run from a checkout
        number = "0"
    return JsonResponse(describe(number))


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = f"there is no {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
    response = error_response(ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


def _failure(request: Request, error: Exception) -> Response:
    """A bug of ours; the server logs it."""
    return error_response(ApiError(500, "internal error", code="internal_error"))
