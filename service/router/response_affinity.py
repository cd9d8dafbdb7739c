"""Where responses are stored: in the replica that generated them, which later requests about them go to."""

from __future__ import annotations

import re

from starlette.requests import Request

from quire.service.router.stream_affinity import StreamKey

_PATH = "/v1/responses"
_ID = rb"resp_[0-9a-f]{48}"
# Inside a JSON string the quotes would be escaped:
_CREATED = re.compile(rb'"id":"(%b)"' % _ID)
_PREVIOUS = re.compile(rb'"previous_response_id"\s*:\s*"(%b)"' % _ID)

# here: another replica may have it
NOT_FOUND = (b'"code":"previous_response_not_found"', b'"code":"item_not_found"')


def wanted_response(request: Request) -> StreamKey | None:
    """Return the stored response that a request reads or deletes, if it does."""
    response_id = request.url.path.removeprefix(f"{_PATH}/").removesuffix("/input_items")
    if request.method == "POST" or not re.fullmatch(_ID.decode(), response_id):
        return None
    return request.state.tenant, response_id


def previous_response(request: Request, body: bytes) -> StreamKey | None:
    """Return the stored response that a request goes on from, if it does."""
    found = _PREVIOUS.search(body) if request.url.path == _PATH else None
    return None if found is None else (request.state.tenant, found.group(1).decode())


def response_key(tenant: str, response_id: str) -> StreamKey | None:
    """Return what a response that a WebSocket's message names goes by, if it may be one of ours."""
    return (tenant, response_id) if re.fullmatch(_ID.decode(), response_id) else None


def created_response(request: Request, content: bytes) -> StreamKey | None:
    """Return the response that an answer, or the beginning of one, tells of."""
    found = _CREATED.search(content) if request.url.path == _PATH else None
    return None if found is None else (request.state.tenant, found.group(1).decode())
