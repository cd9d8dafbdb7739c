"""Passes a request on to a replica, and its answer back byte for byte."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

import aiohttp
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.engine.hashing import Digest
from quire.service.errors import ApiError, not_ready
from quire.service.explain.trace_context import TraceContext
from quire.service.http.connection import STREAM_HEADERS, ClientGone, Connection
from quire.service.http.dialects import dialect_of
from quire.service.router.answer_notes import AnswerNotes
from quire.service.router.attempt import Attempt, Sent
from quire.service.router.endings import BadAnswer, outcome_of_end
from quire.service.router.events import pass_events
from quire.service.router.failures import Outcome
from quire.service.router.headers import Headers, passed_on
from quire.service.router.held import Share, read_body
from quire.service.router.placement import Location, Placement
from quire.service.router.refusals import ReplicaLost, is_busy, lacks_a_response, replica_lost, unsure
from quire.service.router.replica import Replica
from quire.service.router.response_affinity import previous_response, wanted_response
from quire.service.router.state import RouterState
from quire.service.router.stream_affinity import (
    StreamAffinity,
    StreamKey,
    started_request,
    started_stream,
    wanted_request,
    wanted_stream,
)
from quire.service.tracing.otlp import FinishedSpan, Value

log = logging.getLogger("quire.router")

MAX_ATTEMPTS = 3
_OF_STREAMS = frozenset({b"content-type", *(name for name, _ in STREAM_HEADERS)})  # which all of ours have


class Forward:
    """An ASGI app for every path that the replicas answer."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        with Share(self._state.held) as share:
            await _Exchange(self._state, request, await read_body(request, share), share).run(send)

    async def without_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        with Share(self._state.held) as share:
            await _Exchange(self._state, Request(scope, receive), b"", share).run(send)


class _Exchange:
    """One request, sent to one replica after another until one begins to answer."""

    def __init__(self, state: RouterState, request: Request, body: bytes, share: Share) -> None:
        self._state = state
        self._request = request
        self._share = share  # the body's, and its answer's
        self._route: bytes | None = None  # what was decided, as a header
        self._stream_headers: Headers = []  # that a replica's stream has beside ours
        # A stream of what happens here, not of an answer, which has a last event.
        self._is_endless = request.method == "GET" and wanted_stream(request) is None
        self._notes = AnswerNotes(state, request)
        traced = state.exporter is not None and started_request(request) is not None
        self._trace = TraceContext.of(request.headers.get("traceparent")) if traced else None
        self._sent = Sent(request.method, request.scope, self._headers(), body)

    def _headers(self) -> Headers:
        """Return those that every replica gets."""
        request = self._request
        headers = [*passed_on(request.headers.raw), (b"x-request-id", request.state.request_id)]
        if self._trace is not None:
            headers = [header for header in headers if header[0] != b"traceparent"]
            headers.append((b"traceparent", self._trace.header.encode()))
        return headers

    async def run(self, send: Send) -> None:
        async def send_with_route(message: Message) -> None:
            if message["type"] == "http.response.start":
                of_stream = self._stream_headers if message["status"] == 200 else []  # else it did not begin
                route = [] if self._route is None else [(b"x-quire-route", self._route)]
                message["headers"] = [*message["headers"], *of_stream, *route]
            await send(message)

        scope, receive, began = self._request.scope, self._request.receive, time.time()
        connection = Connection(scope, send_with_route, self._state.config)
        self._state.generations.add(connection)
        reply = None
        try:
            async with connection:
                reply = await self._answer(connection)
        except ClientGone as gone:
            log.info("request aborted: %s", gone)
        except ApiError as error:
            self._state.metrics.failures["during" if connection.started else "before"] += 1
            await connection.fail(error, dialect_of(scope["path"]).failure(error))
        finally:
            self._state.generations.discard(connection)
            self._state.streams.discard(connection)
        if reply is not None:
            await reply(scope, receive, send_with_route)
        self._export(began)

    def _export(self, began: float) -> None:
        exporter, trace = self._state.exporter, self._trace
        if exporter is None or trace is None or not trace.sampled:
            return
        attributes: dict[str, Value] = {
            "http.request.method": self._request.method,
            "url.path": self._request.url.path,
            "quire.request_id": self._request.state.request_id.decode(),
            "quire.route": (self._route or b"").decode(),
        }
        span = FinishedSpan(trace, "route", began, time.time(), attributes)
        exporter.add(lambda: [span])

    async def _answer(self, connection: Connection) -> Response | None:
        """Return the answer; None once it was streamed. Raises ApiError."""
        state = self._state
        state.check_open()
        for wanted, affinity in (
            (wanted_stream(self._request), state.stream_affinity),
            (wanted_request(self._request), state.request_affinity),
            (wanted_response(self._request), state.response_affinity),
        ):
            if wanted is not None:
                return await self._pick_up(connection, wanted, affinity)
        prompt = None
        if state.reader is not None and self._sent.body:
            prompt = await state.reader.read(self._request, self._sent.body)
        location = await state.locate(prompt)
        self._notes.is_predicted = prompt is not None and prompt.whole and bool(location.prefixes)
        return await self._ask(connection, location)

    async def _ask(self, connection: Connection, location: Location) -> Response | None:
        """As `_answer`: asks a few until one can begin, or all if each says that it lacks what is needed."""
        state = self._state
        tried: set[Replica] = set()
        busy = lacking = None
        attempt = failed = 0
        while failed < MAX_ATTEMPTS and ((busy is None and lacking is None) or state.has_others(tried)):
            attempt += 1
            placement = await self._place(location, tried)
            tried.add(placement.replica)
            digests = location.digests(placement.replica)
            try:
                reply = await self._attempt(attempt, connection, placement, digests)
            except ReplicaLost as lost:
                if lost.begun:
                    raise replica_lost(" while it worked on this request, which is not tried again") from None
                failed += 1
                continue
            if reply is not None and lacks_a_response(reply):
                lacking = reply
            elif reply is not None and is_busy(reply):
                busy = reply
                failed += 1
            else:
                return reply
        if busy is not None:
            return busy
        if lacking is None:
            raise not_ready("no replica could answer", 2)
        if failed:
            raise unsure()
        return lacking

    async def _pick_up(
        self, connection: Connection, key: StreamKey, affinity: StreamAffinity
    ) -> Response | None:
        """As `_answer`: asks whoever was sent the stream, or the request, then everybody else.

        That one of them is busy or fails says nothing of the others: it is the answer if nobody has it.
        """
        reply, failed, lost, down = None, None, False, 0
        holders = affinity.holders(key, await self._state.everybody())
        for attempt, replica in enumerate(holders, 1):
            down += not replica.up
            if down > MAX_ATTEMPTS:  # so are all that follow, and each may take its time
                break
            try:
                reply = await self._attempt(attempt, connection, await self._state.place_at(replica))
            except ReplicaLost:
                lost = True
                continue
            if reply is not None and (reply.status_code == 429 or reply.status_code >= 500):
                failed = reply
            elif reply is None or reply.status_code != 404:
                return reply
        if failed is not None:
            return failed
        if reply is None or lost or down > MAX_ATTEMPTS:
            raise unsure()
        return reply

    async def _place(self, location: Location, tried: set[Replica]) -> Placement:
        """Choose a replica, and remember that the ids which a request starts are there."""
        request, state = self._request, self._state
        placement = await self._choose(location, tried)
        for key, affinity in (
            (started_stream(request), state.stream_affinity),
            (started_request(request), state.request_affinity),
        ):
            if key is not None:
                affinity.settle(key, placement.replica)
        return placement

    async def _choose(self, location: Location, tried: set[Replica]) -> Placement:
        """Choose a replica. A response is gone on from where it is stored.

        A stream's id is in use where it was used last, and is refused there.
        """
        request, state = self._request, self._state
        for key, affinity in (
            (previous_response(request, self._sent.body), state.response_affinity),
            (started_stream(request), state.stream_affinity),
        ):
            holder = None if key is None or tried else affinity.find(key, state.replicas)
            if holder is not None and holder.up:
                return await state.place_at(holder)
        return await state.place(location, tried)

    async def _attempt(
        self, number: int, connection: Connection, placement: Placement, digests: Sequence[Digest] = ()
    ) -> Response | None:
        """None once it was streamed. Raises ReplicaLost before the first byte, and ApiError after it."""
        self._route = placement.header(number)
        self._state.metrics.placed(placement, number)
        assert self._state.session is not None
        attempt = Attempt(self._state.session, self._sent, placement, digests, self._share)
        try:
            reply = await attempt.run(pass_on=partial(self._stream, connection, placement))
        except ReplicaLost as lost:
            if connection.started:
                raise replica_lost(" in the middle of its answer") from None
            log.warning("attempt %d of a request failed: %s", number, lost)
            raise
        if reply is not None:
            self._notes.take_in(placement, bytes(reply.body))
        return reply

    async def _stream(
        self, connection: Connection, placement: Placement, answer: aiohttp.ClientResponse
    ) -> Outcome:
        """Return how it ended. Raises what says that the replica failed."""
        if self._is_endless:  # a drain does not wait for it
            self._state.check_open()
            self._state.generations.discard(connection)
            self._state.streams.add(connection)
        connection.keep_alive()
        own = passed_on(answer.raw_headers)
        self._stream_headers = [header for header in own if header[0] not in _OF_STREAMS]
        mark = dialect_of(self._request.url.path).framing.after
        passed = partial(self._passed, placement)
        last, rest = await pass_events(answer.content, connection, mark, self._share, passed)
        if last:
            return outcome_of_end(last)
        if not self._is_endless:
            raise BadAnswer("its stream ended without a last event")
        await connection.write(rest, last=True)
        return "answered"

    def _passed(self, placement: Placement, events: bytes) -> None:
        """Note that these are with the client."""
        self._share.give_back(len(self._sent.body))
        self._sent.body = b""
        self._notes.take_in(placement, events)
