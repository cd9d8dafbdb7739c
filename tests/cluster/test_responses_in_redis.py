"""Responses in a Redis: for all replicas, beyond a restart, and what comes of it when Redis is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import redis

from quire.loadtest.servers.redis_server import RedisServer
from quire.service.answer.history import History, Turn
from quire.service.answer.kept_responses import KeptResponses
from quire.service.answer.redis_responses import RedisResponses
from quire.service.answer.stored_responses import ResponseStore, StoredResponse
from quire.service.config import ServiceConfig
from quire.service.errors import ApiError
from quire.service.metrics.counts import Metrics
from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers
from tests.service.conftest import CHAT_TEMPLATE
from tests.service.live import Live

pytestmark = pytest.mark.anyio
SAID = StoredResponse(
    b"{}",
    [{"role": "user", "content": "ü"}],
    {"msg_1": b'{"id": "msg_1"}'},
    [("msg_0", b"{}")],
    [Turn("resp_0", ["msg_x"])],
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("responses"))
    yield server
    server.kill()


class Replica:
    """One that keeps responses in Redis."""

    def __init__(self, server: RedisServer, *, seconds: float = 60, max_bytes: int = 1 << 20) -> None:
        self.metrics = Metrics("m")
        self.memory = ResponseStore(1 << 20)
        shared = RedisResponses(server.url, seconds, max_bytes)
        self.responses = KeptResponses(self.memory, shared, self.metrics)

    async def written(self) -> None:
        await asyncio.wait_for(self.responses.written(), 20)
        assert not self.memory.size


async def test_another_replica_and_a_restarted_one_know_them(server: RedisServer) -> None:
    """By key: no other key finds them. What is deleted is deleted for all."""
    server.client.flushall()
    first = Replica(server)
    first.responses.keep("alice", "resp_1", SAID)
    assert await first.responses.find("alice", "resp_1") == SAID, "at once"
    await first.responses.close()
    second = Replica(server)
    assert await second.responses.find("alice", "resp_1") == SAID
    history = await second.responses.history("alice", "resp_1")
    assert history == History(SAID.conversation, [*SAID.before, Turn("resp_1", ["msg_0", "msg_1"])])
    assert await second.responses.item("alice", "msg_1") == SAID.items["msg_1"]
    assert await second.responses.item("bob", "msg_1") is None
    with pytest.raises(ApiError, match="no response"):
        await second.responses.find("bob", "resp_1")
    third = Replica(server)
    await third.responses.delete("alice", "resp_1")
    for replica in (second, third):
        with pytest.raises(ApiError, match="no response"):
            await replica.responses.delete("alice", "resp_1")
        assert await replica.responses.item("alice", "msg_1") is None
        await replica.responses.close()
    assert second.metrics.response_store_failures == 0


async def test_they_are_bounded_and_whoever_has_most_loses_the_oldest(server: RedisServer) -> None:
    server.client.flushall()
    one = StoredResponse(b"x" * 1000, [], {})
    replica = Replica(server, max_bytes=4500)
    for tenant, response_id in [("many", "0"), ("few", "0"), *(("many", f"{at}") for at in range(1, 5))]:
        replica.responses.keep(tenant, response_id, one)
        await replica.written()
    left = [key.decode() for key in server.client.keys("quire:{responses}:kept:*")]
    assert sorted(key.rsplit("kept:")[1] for key in left) == ["few:0", "many:2", "many:3", "many:4"]
    replica.responses.keep("many", "large", StoredResponse(b"x" * 9000, [], {}))
    await replica.responses.close()
    assert len(server.client.keys("quire:{responses}:kept:*")) == 4


async def test_one_that_did_not_get_through_is_written_with_more_time(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keep(*args: object) -> None:
        raise redis.TimeoutError("no answer")

    monkeypatch.setattr(RedisResponses, "keep", keep)
    replica = Replica(server)
    replica.responses.keep("alice", "resp_large", SAID)
    await replica.written()
    assert await replica.responses.find("alice", "resp_large") == SAID
    assert replica.metrics.response_store_failures == 1
    await replica.responses.close()


async def test_they_live_for_so_long(server: RedisServer) -> None:
    server.client.flushall()
    replica = Replica(server, seconds=30)
    replica.responses.keep("alice", "resp_1", SAID)
    await replica.responses.close()
    for key in ("kept:alice:resp_1", "item:alice:msg_1"):
        assert 20_000 < server.client.pttl(f"quire:{{responses}}:{key}") <= 30_000


async def test_a_redis_that_is_away_is_told_of_and_refuses_only_what_needs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path)
    try:
        replica = Replica(server)
        replica.responses.keep("alice", "resp_1", SAID)
        await replica.written()
        server.kill()
        with caplog.at_level(logging.INFO, "quire.service"):
            replica.responses.keep("alice", "resp_2", SAID)
            assert await replica.responses.find("alice", "resp_2") == SAID
            needs: Any = (replica.responses.find, replica.responses.history, replica.responses.delete)
            for need in needs:
                with pytest.raises(ApiError) as refused:
                    await need("alice", "resp_1")
                assert (refused.value.status, refused.value.code) == (503, "response_store_unavailable")
            assert replica.metrics.response_store == "degraded" and replica.metrics.response_store_failures
            server.start()  # empty
            await replica.written()
        assert replica.metrics.response_store == "redis"
        assert await replica.responses.find("alice", "resp_2") == SAID
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 2 and "kept in memory" in told[0] and told[1].endswith("again")
        await replica.responses.close()
    finally:
        server.kill()


def test_a_conversation_goes_on_after_a_restart(server: RedisServer) -> None:
    """As OpenAI's own client has it; a call's key is asked for as ever."""
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(CHAT_TEMPLATE, {}))
    made: dict[str, Any] = {"response_store": "redis", "redis_url": server.url, "api_keys": ("alice", "bob")}

    def clients(live: Live) -> list[openai.OpenAI]:
        return [openai.OpenAI(base_url=f"{live.url}/v1", api_key=key) for key in ("alice", "bob")]

    before = Live(tokenizer, **made)
    first = clients(before)[0].responses.create(model="tiny", input="hello", max_output_tokens=4)
    assert before.end() == 0
    after = Live(tokenizer, **made)
    alice, bob = clients(after)
    second = alice.responses.create(
        model="tiny", input="more", previous_response_id=first.id, max_output_tokens=4
    )
    assert alice.responses.retrieve(first.id) == first
    listed = alice.responses.input_items.list(second.id, order="asc", limit=2)
    assert len(list(listed)) == 3, "of several pages"
    with pytest.raises(openai.NotFoundError):
        bob.responses.retrieve(first.id)
    assert after.end() == 0


def test_it_needs_a_redis() -> None:
    with pytest.raises(ValueError, match="--redis-url"):
        ServiceConfig(served_model_names=("m",), response_store="redis")
    with pytest.raises(ValueError, match="--response-ttl"):
        ServiceConfig(served_model_names=("m",), response_ttl=0)
