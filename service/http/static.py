"""The chat page: a few files, read once, so that no request's path is ever looked up on disk."""

from __future__ import annotations

import mimetypes
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

PAGE = Path(__file__).parents[1] / "page"

Serve = Callable[[object, Request], Awaitable[Response]]

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_CHANGES = {"cache-control": "no-cache"}
_STAYS = {"cache-control": "public, max-age=31536000, immutable"}  # a library's folder has its version in its name
_TYPES = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".html": "text/html",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}


def page_files(folder: Path = PAGE) -> list[tuple[str, Serve]]:
    """(path, handler): `/` is index.html, and every other file is /static/<its path in the folder>."""
    files = []
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.name.startswith("."):
            name = file.relative_to(folder).as_posix()
            path = "/" if name == "index.html" else f"/static/{name}"
            files.append((path, _serve(file, _STAYS if name.startswith("vendor/") else _CHANGES)))
    return files


def _serve(file: Path, caching: dict[str, str]) -> Serve:
    content = file.read_bytes()
    kind = _TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "text/plain"  # a licence
    headers = {**_HEADERS, **caching}

    async def serve(state: object, request: Request) -> Response:
        return Response(content, headers=headers, media_type=kind)

    return serve
