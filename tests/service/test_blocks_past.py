"""What was before a page was open: told move by move, by an engine that nobody had asked."""

from __future__ import annotations

import base64
import json
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.engine.inspection.messages import NO_MOVES, PoolAnswer, PoolQuestion
from quire.engine.memory.move_kinds import ALLOCATE, EVICT, HOLD, STEP, UNHOLD
from quire.service.inspector import telling
from tests.service.asgi import Exchange
from tests.service.conftest import Service
from tests.service.pool_answers import after_requests, exactly

pytestmark = pytest.mark.anyio


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


def told(answer: PoolAnswer) -> list[dict[str, Any]]:
    """Return the updates for whoever opens the page first."""
    assert answer.exact is not None
    _, _, events = telling.tell_past(answer, answer.exact, lambda salt: "")
    return [json.loads(bytes(event)) for event in events]


def replayed(events: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Return states and references by the first map and the moves alone."""
    first, *rest = events
    states, references = (list(base64.b64decode(first[name])) for name in ("states", "references"))
    for _, _, _, _, _, _, effects in (move for event in rest for move in event["moves"]):
        for place, state, count in zip(*[iter(effects)] * 3, strict=True):
            states[place], references[place] = state, count
    return states, references


async def test_moves_from_before_the_first_watcher_are_told_one_by_one(service: Service) -> None:
    answer = after_requests(3)
    service.engine.answers[PoolQuestion] = answer
    watcher = await watch(service, b"past=true")
    await watcher.until(b'"release"')
    events = updates(watcher)
    assert service.engine.asked[0] == PoolQuestion(0, True)
    assert events[0]["full"] and set(base64.b64decode(events[0]["states"])) == {0}
    kinds = Counter(move[2] for event in events for move in event["moves"])
    assert kinds["allocate"] == kinds["release"] == 12 and kinds["publish"] == 9
    assert replayed(events) == (list(answer.states), list(answer.references))
    await leave(watcher)


async def test_who_comes_later_is_told_the_same_and_who_wants_no_past_is_not(service: Service) -> None:
    service.engine.answers[PoolQuestion] = after_requests(1)
    first, second = [await watch(service, b"past=true") for _ in range(2)]
    await second.until(b'"release"')
    assert updates(second)[0] == updates(first)[0]
    other = await watch(service, b"past=false")
    assert [each["full"] for each in updates(other)] == [True]
    for each in (first, second, other):
        await leave(each)
    blocks = service.state.blocks
    assert (blocks._task, blocks._history, blocks._teller) == (None, None, None)


async def test_moves_of_a_running_watch_are_told_singly_too(service: Service) -> None:
    empty = bytes(4)
    service.engine.answers[PoolQuestion] = exactly(PoolAnswer(1.0, 0.0, 4, 0, 16, empty, empty, [], 0))
    watcher = await watch(service, b"past=false")
    assert service.engine.asked == [PoolQuestion(NO_MOVES, True)]
    one = bytes([1, 1, 0, 0])
    step = (STEP, 7, 0, 0, [])
    later = exactly(PoolAnswer(2.0, 0.0, 4, 0, 16, one, one, [], 0), [step, (ALLOCATE, 3, 0, 0, [0, 1])])
    service.engine.answers[PoolQuestion] = later
    await watcher.until(b'"allocate"')
    moves = [move for event in updates(watcher) for move in event["moves"]]
    assert moves == [[7, 2.0, "allocate", 0, -1, 3, [0, 1, 1]], [7, 2.0, "allocate", 1, -1, 3, [1, 1, 1]]]
    await leave(watcher)


def test_what_is_no_move_in_itself_is_told_with_the_next() -> None:
    """A hold is none: block 1 is in transfer until the hold ends."""
    states, counts = bytes([1, 0]), bytes([1, 0])
    moves = [(EVICT, -2, 0, 0, [1]), (HOLD, -2, 0, 0, [1]), (ALLOCATE, 3, 0, 0, [0]), (UNHOLD, -2, 0, 0, [1])]
    answer = PoolAnswer(1.0, 0.0, 2, 0, 16, states, counts, [], 0)
    first, *rest = told(exactly(answer, [(STEP, 1, 0, 0, []), *moves]))
    assert list(base64.b64decode(first["states"])) == [0, 2]
    assert [move[2:] for event in rest for move in event["moves"]] == [
        ["evict", 1, -1, -1, [1, 0, 0]],
        ["allocate", 0, -1, 3, [0, 1, 1, 1, 4, 0]],
    ]
    assert np.frombuffer(base64.b64decode(rest[-1]["places"]), np.int32).tolist() == [0, 1]


def test_of_very_many_moves_the_newest_are_told_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "MAX_TOLD", 5)
    answer = after_requests(3)
    events = told(answer)
    moves = [move for event in events for move in event["moves"]]
    assert 0 < len(moves) <= 5 and sum(event["moves_lost"] for event in events) > 20
    last = events[-1]
    assert list(base64.b64decode(last["states"])) == [answer.states[place] for place in places(last)]


def places(event: dict[str, Any]) -> list[int]:
    return [int(each) for each in np.frombuffer(base64.b64decode(event["places"]), np.int32)]


def test_a_time_is_that_of_the_step_and_what_is_too_old_is_left_out() -> None:
    """The engine's clock says 2000 s at 5000 s of the day."""
    second = 1_000_000
    moves = [
        (STEP, 1, 0, 1000 * second, []),
        (ALLOCATE, 3, 0, 0, [0]),
        (STEP, 2, 4, 1990 * second, []),
        (ALLOCATE, 3, 0, 1, [1]),
    ]
    both = bytes([1, 1])
    answer = msgspec.structs.replace(PoolAnswer(5000.0, 0.0, 2, 0, 16, both, both, [], 0), clock=2000.0)
    first, last = told(exactly(answer, moves))
    assert (first["at"], list(base64.b64decode(first["states"]))) == (4990.0, [1, 0])
    assert [move[:4] for move in last["moves"]] == [[2, 4990.0, "allocate", 1]]
    assert last["at"] == 5000.0


async def test_counts_have_no_past(service: Service) -> None:
    exchange = Exchange(service.app, "GET", "/v1/blocks/events")
    exchange.scope["query_string"] = b"detail=counts&past=true"
    assert (await exchange.start().finish()).error["param"] == "past"
