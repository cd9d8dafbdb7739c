"""GET /v1/requests/{id}/why."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from quire.service.explain.why import why
from quire.service.http.codec import JsonResponse
from quire.service.state import ServerState


async def why_of(state: ServerState, request: Request) -> Response:
    """Say where the time of a request of this key went, and why."""
    tenant: str = request.state.tenant
    times = state.past_requests.find(tenant, request.path_params["request_id"])
    return JsonResponse(
        why(times, time.monotonic(), lambda number: state.past_requests.name_of(number, tenant))
    )
