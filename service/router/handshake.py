"""A WebSocket's handshake with a replica, on behalf of its client's."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from typing import Annotated

import aiohttp
import msgspec
from starlette.requests import HTTPConnection

from quire.service.errors import ApiError, not_ready
from quire.service.http.subprotocols import offered_key
from quire.service.json_fields import MAX_REPLY_LOGPROBS
from quire.service.router.headers import as_text, passed_on
from quire.service.router.placement import NOWHERE, Placement
from quire.service.router.refusals import BUSY, unsure
from quire.service.router.replica import Replica
from quire.service.router.response_affinity import response_key
from quire.service.router.state import RouterState
from quire.service.router.stream_affinity import StreamKey

MAX_ATTEMPTS = 3
HANDSHAKE_SECONDS = 10.0  # a replica that can take a WebSocket does so at once
# The largest message is a whole answer with its log-probabilities, each some hundred bytes.
MAX_MESSAGE_BYTES = MAX_REPLY_LOGPROBS << 8
_MAX_REFUSAL_BYTES = 64 << 10
_SWITCHING_PROTOCOLS = 101
_PASSED_OVER = BUSY | {502}  # another replica may say better; else this is the answer


class _Detail(msgspec.Struct):
    """Its code becomes a header."""

    message: str
    param: str | None = None
    code: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_.-]{1,64}\Z")] | None = None


class _Refusal(msgspec.Struct):
    error: _Detail


_refusals = msgspec.json.Decoder(_Refusal)


@dataclass(frozen=True)
class Link:
    """A WebSocket that a replica took."""

    placement: Placement
    attempt: int
    socket: aiohttp.ClientWebSocketResponse
    began: float  # when it was asked for

    @property
    def replica(self) -> Replica:
        return self.placement.replica


class Handshake:
    """What one client asks for, said to one replica after another until one takes it."""

    def __init__(self, state: RouterState, client: HTTPConnection) -> None:
        self._state = state
        self._client = client

    async def connect(self) -> Link:
        """Connect to one by its load: nothing is known of prompts yet.

        Raises ApiError if no replica takes it.
        """
        tried: set[Replica] = set()
        refusal = not_ready("no replica could answer", 2)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            placement = await self._state.place(NOWHERE, tried)
            tried.add(placement.replica)
            self._state.metrics.placed(placement, attempt)
            try:
                return await self._attempt(placement, attempt)
            except ApiError as error:
                if error.status not in _PASSED_OVER:
                    raise
                refusal = error
            except (aiohttp.ClientError, OSError, TimeoutError):  # the next one may do better
                pass
            if not self._state.has_others(tried):
                break
        raise refusal

    async def go_on_from(self, response_id: str, here: Replica) -> Link | None:
        """Return a WebSocket of the replica that stored a response. None: that is `here`, or nobody.

        Raises ApiError if the one that has it cannot be had, or one that may have it cannot be asked.
        """
        key = response_key(self._client.state.tenant, response_id)
        if key is None:
            return None
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                storer = await self._storer(key, here)
                return None if storer is here else await self._attempt(Placement.at_home(storer), 1)
        except (aiohttp.ClientError, OSError, TimeoutError):
            raise unsure() from None

    async def _storer(self, key: StreamKey, here: Replica) -> Replica:
        """Return who has a response, by what this router knows, or else what replicas say; else `here`."""
        affinity, replicas = self._state.response_affinity, list(self._state.replicas)
        known = affinity.find(key, replicas)
        if known is not None and known.up:
            return known
        is_sure = True
        for replica in [here, *(replica for replica in replicas if replica is not here)]:
            has = await self._has(replica, key[1]) if replica.up else None
            if has:
                affinity.settle(key, replica)
                return replica
            is_sure = is_sure and has is not None
        if not is_sure:
            raise unsure()
        return here

    async def _has(self, replica: Replica, response_id: str) -> bool | None:
        """Return whether a replica has a response; None if it cannot tell."""
        session, client = self._state.session, self._client
        assert session is not None
        headers = passed_on(client.headers.raw)
        if key := offered_key(client.scope):
            headers = [*headers, (b"x-api-key", key)]
        url = f"{replica.url}/v1/responses/{response_id}"
        try:
            async with session.get(url, headers=as_text(headers), allow_redirects=False) as answer:
                return None if answer.status == 429 or answer.status >= 500 else answer.status == 200
        except (aiohttp.ClientError, OSError):
            return None

    async def _attempt(self, placement: Placement, attempt: int) -> Link:
        """Raises ApiError if the replica refuses, and what aiohttp raises if it cannot be asked."""
        replica, began = placement.replica, time.monotonic()
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                socket = await self._open(placement)
        except ApiError as refusal:
            if refusal.status >= 500 and refusal.status not in BUSY:
                replica.fared("failed", began)
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            replica.failed(began, error)
            raise
        asked = self._client.state.tenant, self._client.state.request_id.decode()
        self._state.request_affinity.settle(asked, replica)
        return Link(placement, attempt, socket, began)

    async def _open(self, placement: Placement) -> aiohttp.ClientWebSocketResponse:
        opened = self._state.session
        assert opened is not None
        client = self._client
        headers = [*passed_on(client.headers.raw), (b"x-request-id", client.state.request_id)]
        async with aiohttp.ClientSession(  # as the router's own, but for what is no WebSocket
            connector=opened.connector,
            connector_owner=False,
            timeout=opened.timeout,
            cookie_jar=opened.cookie_jar,
            middlewares=(_refuse,),
        ) as session:
            return await session.ws_connect(
                placement.replica.address(client.scope),
                headers=dict(as_text([*headers, *placement.headers])),
                protocols=client.scope["subprotocols"],
                max_msg_size=MAX_MESSAGE_BYTES,
            )


async def _refuse(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Raises ApiError with the words of a replica that takes no WebSocket: aiohttp would not read them."""
    response = await handler(request)
    if response.status == _SWITCHING_PROTOCOLS:
        return response
    try:
        body = await response.content.readexactly(_MAX_REFUSAL_BYTES)
    except asyncio.IncompleteReadError as whole:
        body = whole.partial
    finally:
        response.close()
    raise refusal_of(response.status, response.headers.get("retry-after", ""), body)


def refusal_of(status: int, retry_after: str, body: bytes) -> ApiError:
    """Return a replica's refusal as its client is told of it."""
    if not 400 <= status <= 599:
        message = f"the replica answered the WebSocket's handshake with {status}, which is no refusal"
        return ApiError(502, message, code="websocket_refused")
    try:
        detail = _refusals.decode(body).error
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        detail = _Detail(f"the replica refused the WebSocket: {status}", code="websocket_refused")
    seconds = int(retry_after) if re.fullmatch("[0-9]{1,9}", retry_after) else None
    return ApiError(status, detail.message, param=detail.param, code=detail.code, retry_after=seconds)
