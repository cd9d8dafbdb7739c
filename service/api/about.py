"""GET /openapi.json, /docs and /version: the API about itself."""

from __future__ import annotations

from functools import cache
from importlib import metadata

from starlette.requests import Request
from starlette.responses import Response

from quire.service.answer.replies import ServerVersion
from quire.service.api.openapi import describe
from quire.service.http.codec import JsonResponse
from quire.service.state import ServerState


def _number() -> str:
    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "0"


async def version(state: ServerState, request: Request) -> Response:
    return JsonResponse(ServerVersion(version=_number()))


async def openapi(state: ServerState, request: Request) -> Response:
    return JsonResponse(describe(_number()))


async def docs(state: ServerState, request: Request) -> Response:
    return _page()


@cache
def _page() -> Response:
    from quire.service.api.docs_page import page, policy

    html = page(describe(_number()))
    headers = {"content-security-policy": policy(html), "cache-control": "no-cache"}
    return Response(html, headers=headers, media_type="text/html")
