"""How an attempt with a replica fails, and whether another one may be asked then."""

from __future__ import annotations

from starlette.responses import Response

from quire.service.errors import REPLICA_LOST, ApiError
from quire.service.router.response_affinity import NOT_FOUND

_BUSY = frozenset({429, 503})  # it has not begun: another replica may say better; else this is the answer
_STALLED = b'"code":"engine_stalled"'  # a 503 of what may have begun


class ReplicaLost(Exception):
    """A replica failed, before the first byte of its answer or after it.

    `begun`: it may have begun on the request, which may be why it failed; no other replica is to get that.
    """

    def __init__(self, message: str, *, begun: bool) -> None:
        super().__init__(message)
        self.begun = begun


def replica_lost(where: str) -> ApiError:
    return ApiError(502, f"the replica was lost{where}", code=REPLICA_LOST)


def is_refusal(reply: Response) -> bool:
    """Whether a replica has not begun on the request that it answers so."""
    if reply.status_code == 400:
        return any(code in reply.body for code in NOT_FOUND)
    return reply.status_code in _BUSY and _STALLED not in reply.body
