"""All responses that are kept, in memory or in Redis; memory holds what Redis has not taken yet."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from itertools import takewhile
from typing import TypeVar

from quire.service.answer.history import History, Turn
from quire.service.answer.redis_responses import FAILURES, RedisResponses
from quire.service.answer.response_writer import ResponseWriter
from quire.service.answer.store_health import StoreHealth
from quire.service.answer.stored_responses import ResponseStore, StoredResponse
from quire.service.errors import ApiError, bad_value
from quire.service.metrics.counts import Metrics

T = TypeVar("T")


class KeptResponses:
    """While Redis is away responses are kept in memory, and written once it is back.

    What only Redis can answer is then refused, and nothing else.
    """

    def __init__(self, memory: ResponseStore, shared: RedisResponses | None, metrics: Metrics) -> None:
        self._memory = memory
        self._shared = shared
        self._health = StoreHealth(metrics)
        self._writer = None if shared is None else ResponseWriter(memory, shared, self._health)
        metrics.response_store = "memory" if shared is None else "redis"

    def keep(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """At once; Redis has it a little later. Call it in the event loop."""
        self._memory.keep(tenant, response_id, response)
        if self._writer is not None:
            self._writer.add(tenant, response_id)

    async def find(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises ApiError 404, or 503 if only Redis knows and it does not answer."""
        found = await self._found(tenant, response_id)
        if found is None:
            raise _not_found(response_id)
        return found

    async def history(self, tenant: str, response_id: str) -> History:
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
        return found.history(response_id)

    async def item(self, tenant: str, item_id: str) -> bytes | None:
        """Return an item of a stored response's output, if there is such a one. Raises ApiError 503."""
        response_id = self._memory.response_of(tenant, item_id)
        shared = self._shared
        if response_id is None and shared is not None:
            response_id = await self._asked(lambda: shared.response_of(tenant, item_id))
        found = None if response_id is None else await self._found(tenant, response_id)
        return None if found is None else found.items.get(item_id)

    async def turns_before(self, tenant: str, response: StoredResponse) -> list[Turn]:
        """Return what it goes on from, as far back as all of it is still kept. Raises ApiError 503.

        None of them is read.
        """
        ids = [turn.response_id for turn in response.before]
        kept = {each for each in ids if self._memory.has(tenant, each)}
        asked, shared = [each for each in ids if each not in kept], self._shared
        if asked and shared is not None:
            kept |= await self._asked(lambda: shared.kept_of(tenant, asked))
        newest_first = takewhile(lambda turn: turn.response_id in kept, reversed(response.before))
        return list(newest_first)[::-1]

    async def items_of(self, tenant: str, response_id: str) -> list[bytes]:
        """Return those of its input and then of its output; none if it is forgotten. Raises ApiError 503."""
        found = await self._found(tenant, response_id)
        return [] if found is None else found.all_items

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises ApiError 404, or 503 if Redis may have it and does not answer."""
        key, shared, writer = (tenant, response_id), self._shared, self._writer
        there = False
        async with contextlib.nullcontext() if writer is None else writer.at_rest(key):
            unsure = writer is not None and key in writer.unsure
            if shared is not None and (unsure or not self._memory.has(*key)):
                there = await self._asked(lambda: shared.delete(tenant, response_id))
            if writer is not None:
                writer.unsure.discard(key)
            if not self._memory.forget(*key) and not there:
                raise _not_found(response_id)

    async def written(self) -> None:
        """Wait until Redis has all that it takes of what was kept."""
        if self._writer is not None:
            await self._writer.written()

    async def close(self) -> None:
        """Write what is left, if that does not take long."""
        if self._writer is not None:
            await self._writer.close()
        if self._shared is not None:
            await self._shared.close()

    async def _found(self, tenant: str, response_id: str) -> StoredResponse | None:
        found, shared = self._memory.find(tenant, response_id), self._shared
        if found is None and shared is not None:
            found = await self._asked(lambda: shared.find(tenant, response_id))
        return found

    async def _asked(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return what Redis says. Raises ApiError 503."""
        if not self._health.is_away:
            try:
                answer = await ask()
            except FAILURES as error:
                self._health.failed(error)
            else:
                self._health.answered()
                return answer
        raise ApiError(
            503,
            "Redis, which keeps responses, does not answer: try again, or send the whole conversation",
            code="response_store_unavailable",
        )


def _not_found(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"there is no response {response_id!r} of this key: it was not stored, was deleted, or has been "
        "forgotten",
        param="response_id",
        code="response_not_found",
    )
