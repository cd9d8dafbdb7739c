"""The live pool over HTTP: one look for all who watch, none when nobody does; tokens are their key's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quire.engine.inspection.messages import (
    ACTIVE,
    CACHED,
    NO_MOVES,
    BlockAnswer,
    BlockQuestion,
    Holder,
    OwnAnswer,
    OwnQuestion,
    PoolAnswer,
    PoolQuestion,
    Table,
)
from quire.service.inspector.updates import BlockHistory
from tests.service.asgi import Exchange, get, post
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio


def int32(*numbers: int) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def look(at: float, states: list[int], references: list[int], tables: list[Table]) -> PoolAnswer:
    return PoolAnswer(at, 0.001, len(states), 0, 16, bytes(states), bytes(references), tables, 0)


def test_an_update_tells_only_what_is_different() -> None:
    first = look(1.0, [1, 1, 0, 0], [1, 1, 0, 0], [Table(5, 0, "running", 20, int32(0, 1), b"")])
    history = BlockHistory(first)
    assert history.full().states == bytes([1, 1, 0, 0])
    grown = look(2.0, [1, 1, 1, 0], [1, 1, 1, 0], [Table(5, 0, "running", 33, int32(0, 1, 2), b"")])
    update = history.advance(grown)
    assert (update.places, update.states, update.references) == (int32(2), b"\1", b"\1")
    (table,) = update.tables
    assert (table.first, table.blocks, table.tokens) == (2, int32(2), 33)
    gone = history.advance(look(4.0, [2, 0, 0, 0], [0, 0, 0, 0], []))
    assert (gone.places, gone.gone) == (int32(0, 1, 2), [(5, 0)])
    ages = np.frombuffer(history.full().ages, np.float32)
    assert ages.tolist() == [0.0, 0.0, 0.0, -1.0]


async def watch(service: Service, query: bytes = b"", **headers: str) -> Exchange:
    exchange = Exchange(service.app, "GET", "/v1/blocks/events", b"", headers)
    exchange.scope["query_string"] = query
    exchange.start()
    await exchange.until(b"\n\n")
    return exchange


async def leave(exchange: Exchange) -> None:
    exchange.leave()
    assert exchange.task is not None
    await exchange.task


async def test_one_look_is_for_all_and_none_is_taken_for_nobody(service: Service) -> None:
    assert service.engine.asked == []
    watchers = [await watch(service) for _ in range(3)]
    assert service.engine.asked == [PoolQuestion(NO_MOVES, True)]
    for each in watchers:
        assert b'"full":true' in each.body and b'"num_blocks":100' in each.body
        await leave(each)
    assert service.state.blocks._task is None
    again = await watch(service)
    await again.until_true(lambda: len(service.engine.asked) == 2)
    await leave(again)


async def test_counts_do_not_ask_the_engine(service: Service) -> None:
    service.engine.step()
    watcher = await watch(service, b"detail=counts")
    assert b'"active":2,"cached":1,"free":97' in watcher.body
    await leave(watcher)
    assert service.engine.asked == []


async def test_an_unknown_detail_is_refused(service: Service) -> None:
    for query, param in ((b"detail=all", "detail"), (b"rate=5", "rate")):
        exchange = Exchange(service.app, "GET", "/v1/blocks/events")
        exchange.scope["query_string"] = query
        reply = await exchange.start().finish()
        assert (reply.status, reply.error["param"]) == (400, param)


async def test_watchers_hear_that_the_engine_has_died(service: Service) -> None:
    watcher = await watch(service)
    service.engine.die("out of luck")
    await watcher.until(b'"engine_dead"')
    await leave(watcher)


async def test_a_block_tells_its_tokens_to_their_key(make_service: Callable[..., Service]) -> None:
    service = make_service(api_keys=("mine",))
    tokens = service.state.tokenizer.encode("hello", add_special_tokens=False)  # type: ignore[union-attr]
    answer = BlockAnswer(ACTIVE, 2, [Holder(7, 0, 3)], 48, tokens, "abcd")
    service.engine.answers[BlockQuestion] = answer
    reply = await get(service.app, "/v1/blocks/device/17", authorization="Bearer mine")
    assert reply.status == 200
    found: dict[str, Any] = reply.json()
    assert found["holders"] == [{"request": 7, "index": 0, "logical": 3}]
    assert (found["state"], found["text"], found["position"]) == ("active", "hello", 48)
    (question,) = service.engine.asked
    assert isinstance(question, BlockQuestion) and len(question.tenant) == 64
    service.engine.answers[BlockQuestion] = BlockAnswer(CACHED, 0, [], 0, None, "abcd")
    other = (await get(service.app, "/v1/blocks/device/17", authorization="Bearer mine")).json()
    assert (other["tokens"], other["text"], other["digest"]) == (None, None, "abcd")


@pytest.mark.parametrize("path", ["device/100", "host/64", "device/x", "tape/1"])
async def test_a_block_that_is_not_there_is_not_found(service: Service, path: str) -> None:
    assert (await get(service.app, f"/v1/blocks/{path}")).status == 404
    assert service.engine.asked == []


async def test_texts_are_not_looked_at_too_often(service: Service) -> None:
    for _ in range(3):
        reply = await get(service.app, "/v1/blocks/prefixes")
        assert reply.json() == {"block_size": 16, "hits": 0, "evictions": 0, "left_out": 0, "runs": []}
    assert len(service.engine.asked) == 1


async def own(service: Service, names: str, key: str = "mine") -> dict[str, Any]:
    exchange = Exchange(service.app, "GET", "/v1/blocks/own", b"", {"authorization": f"Bearer {key}"})
    exchange.scope["query_string"] = f"requests={names}".encode()
    found: dict[str, Any] = (await exchange.start().finish()).json()
    return found


async def test_blocks_of_ones_own_requests_are_counted(make_service: Callable[..., Service]) -> None:
    service = make_service(api_keys=("mine", "other"))
    body = {"prompt": ["abc", "abd"], "max_tokens": 2}
    headers = {"authorization": "Bearer mine", "x_request_id": "question"}
    assert (await post(service.app, "/v1/completions", body, **headers)).status == 200
    service.engine.answers[OwnQuestion] = OwnAnswer(5, 3, 2, 0)
    counts = {"active": 5, "shared": 3, "cached": 2, "host": 0, "partial": False}
    assert await own(service, "question,unknown") == counts
    await own(service, "question", "other")
    mine, others = (each for each in service.engine.asked if isinstance(each, OwnQuestion))
    assert len(mine.requests) == 2 and others.requests == []
    assert (await own(service, ",".join("x" * 17)))["error"]["param"] == "requests"
