"""All responses that are kept, in memory or in Redis; memory holds what Redis has not taken yet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from quire.service.answer.redis_responses import FAILURES, UNSURE, RedisResponses
from quire.service.answer.stored_responses import ResponseStore, StoredResponse
from quire.service.errors import ApiError, bad_value
from quire.service.metrics.counts import Metrics
from quire.service.text.rendering import TemplateMessage

log = logging.getLogger("quire.service")

T = TypeVar("T")

_RETRY_SECONDS = 1.0
_LAST_SECONDS = 2.0  # for which a server that ends writes what is left


class KeptResponses:
    """While Redis is away responses are kept in memory, and written once it is back.

    What only Redis can answer is then refused, and nothing else.
    """

    def __init__(self, memory: ResponseStore, shared: RedisResponses | None, metrics: Metrics) -> None:
        self._memory = memory
        self._shared = shared
        self._writer: asyncio.Task[None] | None = None
        self._writes = asyncio.Lock()  # or what is deleted could be written after all
        self._away_until = 0.0
        self._unsure: set[tuple[str, str]] = set()  # in memory, and perhaps in Redis
        self._metrics = metrics
        metrics.response_store = "memory" if shared is None else "redis"

    def keep(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """At once; Redis has it a little later. Call it in the event loop."""
        self._memory.keep(tenant, response_id, response)
        if self._shared is not None and (self._writer is None or self._writer.done()):
            self._writer = asyncio.create_task(self._write(self._shared), name="quire-responses")

    async def find(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises ApiError 404, or 503 if only Redis knows and it does not answer."""
        found = await self._found(tenant, response_id)
        if found is None:
            raise _not_found(response_id)
        return found

    async def conversation(self, tenant: str, response_id: str) -> list[TemplateMessage]:
        """Return what was said up to its end. Raises ApiError 400 or 503."""
        found = await self._found(tenant, response_id)
        if found is None:
            raise bad_value(
                "previous_response_id",
                f"previous_response_id is {response_id!r}, and there is no such response to go on from: it "
                "is of another key or server, failed, was not stored, or has been forgotten. Send the whole "
                "conversation as input",
                "previous_response_not_found",
            )
        return found.conversation

    async def item(self, tenant: str, item_id: str) -> bytes | None:
        """Return an item of a stored response's output, if there is such a one. Raises ApiError 503."""
        response_id = self._memory.response_of(tenant, item_id)
        shared = self._shared
        if response_id is None and shared is not None:
            response_id = await self._asked(lambda: shared.response_of(tenant, item_id))
        found = None if response_id is None else await self._found(tenant, response_id)
        return None if found is None else found.items.get(item_id)

    async def inputs(self, tenant: str, response: StoredResponse) -> list[bytes]:
        """Return the items of what was said before it, as far as that is still kept, and its own input."""
        parts = [response.inputs]
        while response.previous is not None:
            found = await self._found(tenant, response.previous)
            if found is None:
                break
            response = found
            parts.append([*response.inputs, *response.items.values()])
        return [item for part in reversed(parts) for item in part]

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises ApiError 404, or 503 if Redis may have it and does not answer."""
        async with self._writes:
            key, shared = (tenant, response_id), self._shared
            there = False
            if shared is not None and (key in self._unsure or self._memory.find(*key) is None):
                there = await self._asked(lambda: shared.delete(tenant, response_id))
                self._unsure.discard(key)
            if not self._memory.forget(*key) and not there:
                raise _not_found(response_id)

    async def written(self) -> None:
        """Wait until Redis has all that was kept."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    async def close(self) -> None:
        """Write what is left, if that does not take long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.written(), _LAST_SECONDS)
        if self._writer is not None:
            self._writer.cancel()
        if self._shared is not None:
            await self._shared.close()

    async def _found(self, tenant: str, response_id: str) -> StoredResponse | None:
        found, shared = self._memory.find(tenant, response_id), self._shared
        if found is None and shared is not None:
            found = await self._asked(lambda: shared.find(tenant, response_id))
        return found

    async def _asked(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return what Redis says. Raises ApiError 503."""
        if time.monotonic() >= self._away_until:
            try:
                answer = await ask()
            except FAILURES as error:
                self._failed(error)
            else:
                self._answered()
                return answer
        raise ApiError(
            503,
            "Redis, which keeps responses, does not answer: try again, or send the whole conversation",
            code="response_store_unavailable",
        )

    async def _write(self, shared: RedisResponses) -> None:
        while (key := self._memory.oldest()) is not None:
            try:
                async with self._writes:
                    response = self._memory.find(*key)
                    if response is not None:
                        await shared.keep(*key, response)
                        self._memory.forget(*key)
            except FAILURES as error:
                if isinstance(error, UNSURE):
                    self._unsure.add(key)
                self._failed(error)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                self._unsure.discard(key)
                self._answered()

    def _failed(self, error: Exception) -> None:
        self._metrics.response_store_failures += 1
        self._away_until = time.monotonic() + _RETRY_SECONDS
        if self._metrics.response_store == "redis":
            self._metrics.response_store = "degraded"
            log.warning(
                "Redis keeps no responses now (%s): new ones are kept in memory, and written to it once it "
                "answers",
                error,
            )

    def _answered(self) -> None:
        self._away_until = 0.0
        if self._metrics.response_store == "degraded":
            self._metrics.response_store = "redis"
            log.info("Redis keeps responses again")


def _not_found(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"there is no response {response_id!r} of this key: it was not stored, was deleted, or has been "
        "forgotten",
        param="response_id",
        code="response_not_found",
    )
