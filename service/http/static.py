"""The pages: a few files, read once, so that no request's path is ever looked up on disk.

What several pages have is written once, in `parts`, and stands where `<!-- part: NAME -->` does. A browser
asks each time whether a file has changed, and gets it again only if it has.
"""

from __future__ import annotations

import gzip
import mimetypes
import re
from collections.abc import Awaitable, Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path, PurePath

from starlette.requests import Request
from starlette.responses import Response

from quire.service.http.module_preloads import with_preloads

PAGE = Path(__file__).parents[1] / "page"
PARTS = PAGE / "parts"

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
_STAYS = {"cache-control": "public, max-age=31536000, immutable"}  # a library's version is in its path
_COMPRESSED = {"text/javascript", "text/html", "text/css", "image/svg+xml"}
_TYPES = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".html": "text/html",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}


@cache
def page_files(folder: Path = PAGE) -> list[tuple[str, Serve]]:
    """(path, handler): a page is where its folder or its name says, every other file under /static."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and not file.name.startswith(".")]
    return [(_path(file.relative_to(folder)), _serve(file)) for file in files if file.parent != PARTS]


def _path(name: PurePath) -> str:
    """Return `/` for index.html, /blocks for blocks/index.html, /blocks/lab for blocks/lab.html."""
    if name.suffix != ".html":
        return f"/static/{name.as_posix()}"
    page = name.parent if name.stem == "index" else name.with_suffix("")
    return f"/{page.as_posix()}".removesuffix("/.") or "/"


def _serve(file: Path) -> Serve:
    content = _whole(file.read_bytes()) if file.suffix == ".html" else file.read_bytes()
    kind = _TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "text/plain"  # a licence
    packed = gzip.compress(content, mtime=0) if kind in _COMPRESSED else None
    tag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
    headers = {**_HEADERS, **(_STAYS if "vendor" in file.parts else _CHANGES)}
    headers |= {"etag": f"W/{tag}", "vary": "accept-encoding"}  # weak: it is that of both encodings

    async def serve(state: object, request: Request) -> Response:
        if _names(request.headers.get("if-none-match", ""), tag):
            return Response(status_code=304, headers=headers)
        if packed is not None and _takes_gzip(request.headers.get("accept-encoding", "")):
            return Response(packed, headers={**headers, "content-encoding": "gzip"}, media_type=kind)
        return Response(content, headers=headers, media_type=kind)

    return serve


def _names(if_none_match: str, tag: str) -> bool:
    return any(each.strip().removeprefix("W/") in ("*", tag) for each in if_none_match.split(","))


def _takes_gzip(accept_encoding: str) -> bool:
    """Return whether gzip is named, and not with a weight of 0."""
    for each in accept_encoding.split(","):
        name, _, weight = each.replace(" ", "").lower().partition(";q=")
        if name == "gzip":
            return weight.strip("0.") != "" or weight == ""
    return False


def _whole(page: bytes) -> bytes:
    """Return the page with its parts, and with links to all modules that its script imports."""
    whole = re.sub(rb" *<!-- part: (\w+) -->\n", lambda part: _part(part[1].decode()), page)
    return with_preloads(whole, PAGE)


def _part(name: str) -> bytes:
    return (PARTS / f"{name}.html").read_bytes()
