"""Which other sites' pages may read answers and open WebSockets: none, unless they are named."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

ANY = "*"

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_METHODS = ("GET", "HEAD", "POST")
_SHOWN = ("Retry-After", "X-Quire-Ignored", "X-Quire-Route", "X-Request-Id")


def clean_origin(text: str) -> str:
    """An origin as browsers spell it. Raises ValueError."""
    origin = text.strip().lower()
    if origin != ANY and not _ORIGIN.fullmatch(origin):
        raise ValueError(
            f"--cors-origin must be * or an origin without a path, such as https://chat.example, got {text!r}"
        )
    scheme, _, _ = origin.partition("://")
    return origin.removesuffix(_DEFAULT_PORTS.get(scheme, "/"))


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


def is_allowed(origin: bytes, origins: Sequence[str]) -> bool:
    return ANY in origins or origin.decode("latin-1") in origins
