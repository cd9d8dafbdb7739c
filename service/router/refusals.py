"""How an attempt with a replica fails, and whether another one may be asked then."""

from __future__ import annotations

import re

from starlette.responses import Response

from quire.service.errors import ENGINE_DEAD, ENGINE_STALLED, ERROR_HEADER, REPLICA_LOST, ApiError, not_ready
from quire.service.router.failures import Outcome
from quire.service.router.response_affinity import NOT_FOUND

BUSY = frozenset({429, 503})  # another replica may say better; else this is the answer
_CODE = re.compile(rb'"code":"(\w+)"')  # inside a JSON string the quotes would be escaped
_OF_ALL_REQUESTS = frozenset({"not_ready", ENGINE_DEAD, ENGINE_STALLED})


class ReplicaLost(Exception):
    """A replica failed, before the first byte of its answer or after it.

    `begun`: it may have begun on the request, which may be why it failed; no other replica is to get that.
    """

    def __init__(self, message: str, *, begun: bool) -> None:
        super().__init__(message)
        self.begun = begun


def replica_lost(where: str) -> ApiError:
    return ApiError(502, f"the replica was lost{where}", code=REPLICA_LOST)


def unsure() -> ApiError:
    return not_ready("a replica that may have what is asked for does not answer", 2)


def is_busy(reply: Response) -> bool:
    """Return whether a replica has not begun on the request that it answers so, for now."""
    return reply.status_code in BUSY and _code_of(reply) != ENGINE_STALLED


def outcome_of(reply: Response) -> Outcome:
    """Return how the request fared that a replica answers so."""
    if reply.status_code < 400:
        return "answered"
    return "failed" if reply.status_code >= 500 and not is_busy(reply) else "refused"


def is_dead(reply: Response) -> bool:
    """Return whether a replica says that its engine died with the request."""
    return reply.status_code == 500 and _code_of(reply) == ENGINE_DEAD


def lacks_a_response(reply: Response) -> bool:
    """Return whether a replica lacks what a request goes on from, which another one may have."""
    return reply.status_code == 400 and any(code in reply.body for code in NOT_FOUND)


def is_out(reply: Response) -> bool:
    """Return whether a replica says that it takes no requests at all, not of one that needs more.

    Of a 503 without a code nothing else is known.
    """
    code = _code_of(reply)
    return reply.status_code == 503 and (code is None or code in _OF_ALL_REQUESTS)


def _code_of(reply: Response) -> str | None:
    """Return an error's code; older replicas tell it in the body only, if that has a place for it."""
    found = _CODE.search(reply.body)
    return reply.headers.get(ERROR_HEADER) or (None if found is None else found.group(1).decode())
