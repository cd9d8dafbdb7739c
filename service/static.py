"""The chat page: a few files, read once, so that no request's path is ever looked up on disk."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE = Path(__file__).parent / "page"

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_TYPES = {".js": "text/javascript", ".html": "text/html", ".css": "text/css", ".svg": "image/svg+xml"}


def page_routes(folder: Path = PAGE) -> list[Route]:
    """`/` is index.html; every other file is /static/<name>."""
    routes = []
    for file in sorted(folder.glob("*")):
        if file.is_file() and not file.name.startswith("."):
            path = "/" if file.name == "index.html" else f"/static/{file.name}"
            routes.append(Route(path, _serve(file)))
    return routes


def _serve(file: Path):  # type: ignore[no-untyped-def]
    content = file.read_bytes()
    kind = _TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"

    async def endpoint(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)

    return endpoint
