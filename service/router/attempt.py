"""One attempt: a replica is sent a request, and what becomes of it there is noted of the replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import aiohttp
from starlette.responses import Response
from starlette.types import Scope

from quire.engine.hashing import Digest
from quire.service.http.dialects import STREAM_TYPES
from quire.service.router.endings import BadAnswer, EngineDied
from quire.service.router.failures import Outcome
from quire.service.router.headers import Headers, are_well_formed, as_text, passed_on
from quire.service.router.held import Share
from quire.service.router.placement import Placement
from quire.service.router.refusals import ReplicaLost, is_dead, is_out, outcome_of
from quire.service.router.sessions import UsedConnection

# Of GET and HEAD nothing begins that could make a replica die.
_HARMLESS = frozenset({"GET", "HEAD"})
_WITHOUT_BODY = frozenset({204, 304})
_NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_NOT_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")

PassOn = Callable[[aiohttp.ClientResponse], Awaitable[Outcome]]


@dataclass
class Sent:
    """A request as every replica gets it."""

    method: str
    scope: Scope  # whose path and query it has
    headers: Headers
    body: bytes  # until it cannot have to be sent again

    @property
    def is_harmless(self) -> bool:
        return self.method in _HARMLESS


class Attempt:
    """One request with one replica."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        sent: Sent,
        placement: Placement,
        digests: Sequence[Digest],
        share: Share,
    ) -> None:
        """`digests`: of the prompt, as the replica makes them; `share`: what an answer is held in."""
        self._session = session
        self._sent = sent
        self._placement = placement
        self._replica = placement.replica
        self._digests = digests
        self._share = share
        self._connection = UsedConnection()
        self._is_answered = False  # its headers have come
        self._ending: Outcome = "answered"  # how its stream ended
        self._began = time.monotonic()

    async def run(self, pass_on: PassOn) -> Response | None:
        """Return the answer. None: it was a stream, and `pass_on` has had it and returned how it ended.

        Raises ReplicaLost: once it is in vain to wait for the replica, and also for what `pass_on` raises of
        a stream that did not end as it should.
        """
        try:
            async with asyncio.timeout(None) as patience:
                with self._replica.request(self._digests, give_up=partial(_end, patience)):
                    reply = await self._answer(pass_on)
        except (aiohttp.ClientError, OSError, TimeoutError, EngineDied, BadAnswer) as error:
            raise self._lost(error) from None
        self._note(self._ending if reply is None else outcome_of(reply))
        if reply is not None and reply.status_code >= 400:
            self._replica.sent_prefixes.refused(self._digests)
        if reply is not None and is_out(reply):
            self._replica.lost(f"it answers {reply.status_code}")
        return reply

    async def _answer(self, pass_on: PassOn) -> Response | None:
        async with self._send() as answer:
            self._is_answered = True
            # Headers come with the first token.
            self._replica.sent_prefixes.answered(self._digests, time.monotonic())
            if not 200 <= answer.status <= 599 or not are_well_formed(answer.raw_headers):
                raise BadAnswer(f"its answer {answer.status} is no HTTP")
            is_stream = answer.content_type in STREAM_TYPES and self._sent.method != "HEAD"
            if is_stream and answer.status == 200:
                self._ending = await pass_on(answer)
                return None
            reply = _reply(answer, await self._whole(answer))
        if is_dead(reply):
            raise EngineDied("its engine died")
        return reply

    def _send(self) -> aiohttp.client._RequestContextManager:
        sent, placement = self._sent, self._placement
        return self._session.request(
            sent.method,
            self._replica.address(sent.scope),
            headers=as_text([*sent.headers, *placement.headers]),
            data=sent.body or None,
            allow_redirects=False,
            skip_auto_headers=_NOT_ADDED,
            trace_request_ctx=self._connection,
        )

    async def _whole(self, answer: aiohttp.ClientResponse) -> bytes:
        """Raises ApiError 429 if it is too much beside all others."""
        chunks = []
        async for chunk in answer.content.iter_any():
            self._share.take(len(chunk))
            chunks.append(chunk)
        return b"".join(chunks)

    def _lost(self, error: Exception) -> ReplicaLost:
        """Note that the replica failed, and return how."""
        replica = self._replica
        replica.fared("failed", self._began)
        closed = self._connection.reused and isinstance(error, aiohttp.ServerDisconnectedError)
        if self._is_answered or not closed:  # else it may just have closed what was idle for long
            replica.lost(error)
        replica.sent_prefixes.refused(self._digests)
        begun = not self._sent.is_harmless and not isinstance(error, _NEVER_SENT)
        return ReplicaLost(f"{replica.name}: {str(error) or type(error).__name__}", begun=begun)

    def _note(self, outcome: Outcome) -> None:
        """Note how it fared; what begins nothing tells nothing of how the rest does."""
        if not self._sent.is_harmless:
            self._replica.fared(outcome, self._began)


def _end(patience: asyncio.Timeout) -> None:
    if not patience.expired():
        patience.reschedule(asyncio.get_running_loop().time())


def _reply(answer: aiohttp.ClientResponse, content: bytes) -> Response:
    """Return an answer as its client gets it."""
    reply = Response(content, answer.status)
    reply.raw_headers = passed_on(answer.raw_headers)
    if answer.status not in _WITHOUT_BODY:
        length = answer.headers.get("content-length", str(len(content)))  # of HEAD: what GET would have
        reply.raw_headers.append((b"content-length", length.encode()))
    return reply
