"""Cross-origin answers: none of other sites' pages may read any, unless they are named."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from quire.service.origins import ANY

_METHODS = ("DELETE", "GET", "HEAD", "POST")
_SHOWN = ("Request-Id", "Retry-After", "X-Quire-Error", "X-Quire-Ignored", "X-Quire-Route", "X-Request-Id")


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app` with preflights answered and its answers, errors too, readable for pages of these origins.

    Cookies mean nothing here, so no credentials are allowed: a key goes into the Authorization header.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=_METHODS,
        allow_headers=[ANY],
        allow_private_network=True,
        expose_headers=_SHOWN,
    )
