"""GET /openapi.json, /docs and /version: the API about itself."""

from __future__ import annotations

from importlib import metadata

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.service.answer.replies import ServerVersion
from quire.service.api.openapi import describe
from quire.service.http.codec import JsonResponse
from quire.service.http.made_once import MadeOnce
from quire.service.state import ServerState


def _number() -> str:
    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "0"


async def version(state: ServerState, request: Request) -> Response:
    return JsonResponse(ServerVersion(version=_number()))


class About:
    """The description of the API, which takes a third of a second to make, and a page of it."""

    def __init__(self) -> None:
        self._document = MadeOnce(_document)
        self._page = MadeOnce(_page)

    async def openapi(self, state: ServerState, request: Request) -> Response:
        return Response(await self._document.get(), media_type="application/json")

    async def docs(self, state: ServerState, request: Request) -> Response:
        html, headers = await self._page.get()
        return Response(html, headers=headers, media_type="text/html")


def _document() -> bytes:
    return msgspec.json.encode(describe(_number()))


def _page() -> tuple[str, dict[str, str]]:
    from quire.service.api.docs_page import page, policy

    html = page(describe(_number()))
    return html, {"content-security-policy": policy(html), "cache-control": "no-cache"}
