"""The API process keeps nothing of a request that has ended, however it did."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.engine.messages import Output
from quire.engine.request_stream import RequestStream
from quire.service.answer.choice import Choice
from quire.service.answer.generation import Generation
from quire.service.answer.group import Group
from quire.service.answer.stream import GenerationResponse
from quire.service.errors import not_ready
from quire.service.http.connection import Connection
from tests.service.asgi import Exchange, exchange, settle
from tests.service.conftest import Service
from tests.service.fake_engine import FakeStream

pytestmark = pytest.mark.anyio
KINDS = (Generation, Group, Choice, FakeStream, RequestStream, Connection, GenerationResponse)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}]}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("/v1/completions", {"prompt": "abc"}),
    "prompts": ("/v1/completions", {"prompt": ["abc", "def"], "n": 2, "logprobs": 2}),
    "beams": ("/v1/completions", {"prompt": "abc", "n": 2, "use_beam_search": True, "temperature": 0}),
    "stop": ("/v1/completions", {"prompt": "abc", "stop": ["bc"]}),
    "chat": ("/v1/chat/completions", CHAT),
}


async def to_the_end(service: Service, running: Exchange) -> None:
    while service.engine.active:
        service.engine.step()
        await settle()


async def leaves(service: Service, running: Exchange) -> None:
    service.engine.step()
    await settle()
    running.leave()


async def engine_fails(service: Service, running: Exchange) -> None:
    service.engine.step()
    await settle()
    stream = service.engine.active[0]
    stream.push(Output(stream.request_id, 0, [], finish_reason="error", error="it raised"))
    await settle()


async def is_given_up(service: Service, running: Exchange) -> None:
    """As by the watchdog, and when the server ends."""
    service.engine.step()
    await settle()
    for generation in list(service.state.watchdog.generations):
        generation.fail(not_ready("given up"))
    await settle()


def living() -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in KINDS)


async def three(service: Service, path: str, body: dict[str, Any], way: Callable[..., Any]) -> None:
    """Requests one after the other, of which nothing is held here any more."""
    for _ in range(3):
        running = exchange(service.app, path, body)
        await service.engine.until_added(1)
        await settle()
        await way(service, running)
        assert running.task is not None
        await running.task
        assert service.engine.streams and not service.engine.active
        service.engine.streams.clear()
        del running
        await settle()


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", REQUESTS)
async def test_what_goes_well_leaves_nothing_to_a_collector(
    make_service: Callable[..., Service], stream: bool, kind: str
) -> None:
    path, body = REQUESTS[kind]
    await three(make_service(auto=False), path, body | {"max_tokens": 12, "stream": stream}, to_the_end)
    assert not living()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("way", [leaves, engine_fails, is_given_up], ids=lambda way: way.__name__)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", REQUESTS)
async def test_nobody_keeps_what_ends_otherwise(
    make_service: Callable[..., Service], way: Callable[..., Any], stream: bool, kind: str
) -> None:
    """An error and the frames it has come through name each other: that is this process's collector's."""
    path, body = REQUESTS[kind]
    await three(make_service(auto=False), path, body | {"max_tokens": 12, "stream": stream}, way)
    gc.collect()
    assert not living()
