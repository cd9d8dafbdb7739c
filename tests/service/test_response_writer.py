"""Responses on their way to Redis: none that it does not take holds up those behind it."""

from __future__ import annotations

import asyncio

import pytest
import redis

from quire.service.answer import response_writer
from quire.service.answer.kept_responses import KeptResponses
from quire.service.answer.redis_responses import RedisResponses, takes_nothing
from quire.service.answer.stored_responses import ResponseStore, StoredResponse
from quire.service.metrics.counts import Metrics

pytestmark = pytest.mark.anyio
SAID = StoredResponse(b"{}", [{"role": "user", "content": "hello"}], {})


class DeafRedis(RedisResponses):
    """One that never answers for some responses, as for those too large for the time that they have."""

    def __init__(self, *deaf_to: str, slowly: bool = False) -> None:
        """slowly: also if it is given more time."""
        super().__init__("redis://127.0.0.1:1", 60, 1 << 20)
        self.deaf_to = deaf_to
        self.deaf_slowly = slowly
        self.error: Exception = redis.TimeoutError("no answer")
        self.is_there = True
        self.taken: list[str] = []
        self.tried: list[str] = []
        self._tries: asyncio.Queue[str] = asyncio.Queue()

    async def wait_for_tries(self, count: int) -> None:
        for _ in range(count):
            await self._tries.get()

    def _try(self, response_id: str) -> None:
        self.tried.append(response_id)
        self._tries.put_nowait(response_id)

    async def keep(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        self._try(response_id)
        if not self.is_there or response_id in self.deaf_to:
            raise self.error
        self.taken.append(response_id)

    async def keep_slowly(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        self._try(response_id)
        if self.deaf_slowly:
            raise self.error
        self.taken.append(response_id)

    async def answers(self) -> bool:
        return self.is_there

    async def delete(self, tenant: str, response_id: str) -> bool:
        if response_id not in self.taken:
            return False
        self.taken.remove(response_id)
        return True


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_writer, "RETRY_SECONDS", 0.001)


def kept(shared: DeafRedis, *names: str) -> tuple[KeptResponses, ResponseStore, Metrics]:
    memory, metrics = ResponseStore(1 << 20), Metrics("m")
    responses = KeptResponses(memory, shared, metrics)
    for name in names:
        responses.keep("alice", name, SAID)
    return responses, memory, metrics


async def test_one_that_is_never_taken_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """It stays in memory, is told of, and can be read and deleted as ever."""
    shared = DeafRedis("bad", slowly=True)
    responses, memory, metrics = kept(shared, "bad", "one", "two")
    await responses.written()
    assert shared.taken == ["one", "two"] and shared.tried.count("bad") == 4
    assert await responses.find("alice", "bad") == SAID
    assert (metrics.responses_not_written, metrics.response_store_failures) == (1, 4)
    assert metrics.response_store == "redis", "it is there"
    (told,) = (record.getMessage() for record in caplog.records)
    assert "does not take the response bad" in told
    responses.keep("alice", "three", SAID)
    await responses.written()
    assert shared.taken[-1] == "three" and shared.tried.count("bad") == 4
    await responses.delete("alice", "bad")
    assert not memory.size


async def test_one_that_needs_more_time_is_taken_after_the_others() -> None:
    shared = DeafRedis("large")
    responses, memory, metrics = kept(shared, "large", "one", "two")
    await responses.written()
    assert sorted(shared.taken) == ["large", "one", "two"] and not memory.size
    assert metrics.responses_not_written == 0


async def test_none_is_given_up_while_redis_is_away() -> None:
    shared = DeafRedis()
    shared.is_there = False
    responses, memory, metrics = kept(shared, "one", "two")
    await shared.wait_for_tries(9)
    assert set(shared.tried) == {"one"}, "and it is asked for one alone"
    assert metrics.response_store == "degraded"
    shared.is_there = True
    await responses.written()
    assert shared.taken == ["one", "two"] and not memory.size
    assert (metrics.response_store, metrics.responses_not_written) == ("redis", 0)


async def test_none_is_given_up_while_redis_takes_nothing() -> None:
    """As when its memory is full: it answers, and says so."""
    shared = DeafRedis("one")
    shared.error = redis.exceptions.OutOfMemoryError("no room")
    responses, _, metrics = kept(shared, "one", "two")
    await shared.wait_for_tries(9)
    shared.deaf_to = ()
    await responses.written()
    assert shared.taken == ["one", "two"] and metrics.responses_not_written == 0
    assert takes_nothing(redis.ResponseError("MISCONF cannot save")) and not takes_nothing(ValueError())


async def test_what_is_deleted_while_it_waits_is_not_written() -> None:
    shared = DeafRedis("bad", slowly=True)
    responses, memory, metrics = kept(shared, "bad")
    await shared.wait_for_tries(1)
    await responses.delete("alice", "bad")
    shared.deaf_slowly = False
    await responses.written()
    assert shared.taken == [] and not memory.size and metrics.responses_not_written == 0


async def test_no_more_names_wait_than_memory_has_responses() -> None:
    """While Redis is away: the first stays, as alice has no other, and bob makes room for himself."""
    shared = DeafRedis()
    shared.is_there = False
    memory = ResponseStore(8 * SAID.size)
    responses = KeptResponses(memory, shared, Metrics("m"))
    responses.keep("alice", "first", SAID)
    for number in range(500):
        responses.keep("bob", f"{number}", SAID)
    assert len(memory) == 8 and memory.has("alice", "first")
    assert responses._writer is not None and len(responses._writer._all.tries) < 200
    await shared.wait_for_tries(2)
    shared.is_there = True
    await responses.written()
    assert shared.taken == ["first", *map(str, range(493, 500))]


async def test_no_more_names_are_in_doubt_than_memory_has_responses() -> None:
    names = [f"{number}" for number in range(200)]
    shared = DeafRedis(*names, slowly=True)
    responses = KeptResponses(ResponseStore(8 * SAID.size), shared, Metrics("m"))
    for name in names:
        responses.keep("alice", name, SAID)
        await responses.written()
    assert responses._writer is not None and len(responses._writer.unsure) < 100


async def test_one_that_memory_forgets_while_redis_is_asked_is_let_go() -> None:
    class Flooded(DeafRedis):
        async def keep(self, tenant: str, response_id: str, response: StoredResponse) -> None:
            self._try(response_id)
            if response_id == "first":
                for number in range(500):
                    responses.keep("alice", f"{number}", SAID)
                raise self.error
            self.taken.append(response_id)

    shared = Flooded()
    responses = KeptResponses(ResponseStore(8 * SAID.size), shared, Metrics("m"))
    responses.keep("alice", "first", SAID)
    await responses.written()
    assert shared.taken == [*map(str, range(492, 500))]
