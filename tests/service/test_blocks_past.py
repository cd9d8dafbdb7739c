"""What was before a page was open: kept for some minutes, looked at seldom, told once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from quire.engine.inspection.messages import GlanceQuestion, PoolAnswer, PoolQuestion
from quire.service.inspector import feed
from quire.service.inspector.past import CHAPTER, Past
from tests.service.asgi import Exchange
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio


def look(at: float, states: list[int]) -> PoolAnswer:
    return PoolAnswer(at, 0.0, len(states), 0, 16, bytes(states), bytes(states), [], 0, [], 0)


def raw(name: str) -> msgspec.Raw:
    return msgspec.Raw(name.encode())


def test_the_past_begins_with_a_map_however_much_is_forgotten() -> None:
    past = Past(max_seconds=10.0)
    for second in range(3 * CHAPTER):
        past.add(float(second), raw(f"c{second}"), lambda second=second: raw(f"map{second}"))  # type: ignore[misc]
    told = [bytes(event).decode() for event in past.events()]
    begun = int(told[0].removeprefix("map"))
    assert told[1:] == [f"c{second}" for second in range(begun + 1, 3 * CHAPTER)]
    assert 3 * CHAPTER - begun <= 10 + CHAPTER


def test_the_past_takes_no_more_room_than_it_may() -> None:
    past = Past(max_bytes=1000)
    for _ in range(10 * CHAPTER):
        past.add(0.0, raw("123"), lambda: raw("map"))
    assert sum(len(bytes(event)) for event in past.events()) <= 1000 + 3 * CHAPTER


async def watch(service: Service, query: bytes) -> Exchange:
    exchange = Exchange(service.app, "GET", "/v1/blocks/events")
    exchange.scope["query_string"] = query
    exchange.start()
    await exchange.until(b"\n\n")
    return exchange


def updates(exchange: Exchange) -> list[dict[str, Any]]:
    lines = [line for line in exchange.body.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def leave(exchange: Exchange) -> None:
    exchange.leave()
    assert exchange.task is not None
    await exchange.task


@pytest.fixture
def glances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "GLANCE_PERIOD", 0.0)


async def test_glances_are_taken_only_when_blocks_have_moved(service: Service, glances: None) -> None:
    service.engine.step()
    state = service.state
    engine = state.engine
    assert engine is not None
    glancing = asyncio.create_task(state.blocks.glance(engine, lambda: state.metrics.stats))
    for _ in range(20):
        await asyncio.sleep(0)
    assert service.engine.asked == [GlanceQuestion()]
    glancing.cancel()


async def test_whoever_comes_is_told_what_was_before(service: Service) -> None:
    for at, states in ((1.0, [0, 0]), (6.0, [1, 0]), (11.0, [1, 1])):
        service.state.blocks._take(look(at, states))
    service.engine.answers[PoolQuestion] = look(12.0, [2, 1])
    watcher = await watch(service, b"past=true")
    await watcher.until(b'"at":12.0')
    assert [(each["at"], each["full"]) for each in updates(watcher)] == [
        (1.0, True),
        (6.0, False),
        (11.0, False),
        (12.0, False),
    ]
    await leave(watcher)
    other = await watch(service, b"past=false")
    assert [each["full"] for each in updates(other)] == [True]
    await leave(other)


async def test_counts_have_no_past(service: Service) -> None:
    exchange = Exchange(service.app, "GET", "/v1/blocks/events")
    exchange.scope["query_string"] = b"detail=counts&past=true"
    assert (await exchange.start().finish()).error["param"] == "past"
