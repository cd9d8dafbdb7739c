"""An engine that has work and makes no step: what waits for it ends, and nothing new is taken meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from quire.service.errors import ApiError
from quire.service.text.tokenizer import Tokenizer
from quire.service.watchdog import DEFAULT_TIMEOUT, DEFAULT_TIMEOUT_ON_CPU, Watchdog
from tests.service.asgi import get, post, settle
from tests.service.asgi_socket import Socket
from tests.service.conftest import Service
from tests.service.fake_engine import FakeEngine, make_info
from tests.service.live import Live
from tests.service.test_socket_server import create, opened, until
from tests.service.test_streams import ENDLESS, started

pytestmark = pytest.mark.anyio


@pytest.fixture
async def manual(make_service: Callable[..., Service]) -> Service:
    """Nothing moves until the test says so, and no time passes for its watchdog."""
    service = make_service(auto=False)
    service.state.watchdog = Watchdog(10.0, lambda: 0.0)
    return service


def look(service: Service, seconds: float) -> None:
    """At an engine that has been without a step for so long."""
    service.engine.stalled = seconds
    service.state.watchdog.look(service.engine)


def is_stalled(watchdog: Watchdog) -> bool:
    try:
        watchdog.check()
    except ApiError as error:
        assert (error.status, error.code) == (503, "engine_stalled")
        return True
    return False


async def test_what_waits_ends_once_and_is_aborted(manual: Service) -> None:
    """With a status if nothing was sent yet, and else with an event."""
    streaming = await started(manual, ENDLESS | {"stream": True})
    manual.engine.step()
    await streaming.until(b"data: ")
    silent = await started(manual, ENDLESS | {"stream": True})
    whole = await started(manual, ENDLESS | {"prompt": ["abc", "def"], "n": 2})
    socket = Socket(manual.app).start()
    socket.create("hello", stream_id="a")
    await socket.until_type("response.created")
    socket.create("and then", stream_id="a")  # waits for the one before
    look(manual, 10.0)
    assert all(stream.unfinished for stream in manual.engine.streams)
    look(manual, 10.1)
    assert all(stream.aborted for stream in manual.engine.streams)
    look(manual, 10.2)  # again and again while it lasts
    reply = await streaming.finish()
    errors = [event["error"] for event in reply.events if "error" in event]
    assert reply.events[-1]["error"] == errors[0] and len(errors) == 1
    assert errors[0]["code"] == "engine_stalled" and "--stall-timeout" in errors[0]["message"]
    for running in (silent, whole):
        reply = await running.finish()
        assert (reply.status, reply.error["code"]) == (503, "engine_stalled")
        assert int(reply.headers["retry-after"]) > 0
    refused = await socket.until_type("error")
    assert (refused["status"], refused["error"]["code"]) == (503, "engine_stalled")
    failed = [event["response"] for event in socket.events if event["type"] == "response.failed"]
    assert len(failed) == 1 and "--stall-timeout" in failed[0]["error"]["message"]
    assert manual.state.metrics.finished["error"] == 1 + 1 + 2 + 1  # of the prompts, whatever n is
    assert manual.state.queue.prompts == 0
    assert not manual.state.generations
    assert not manual.state.watchdog.generations
    socket.leave()


async def test_a_stream_that_has_all_its_tokens_only_has_to_be_read(manual: Service) -> None:
    running = await started(manual, {"prompt": "ab", "max_tokens": 2, "stream": True})
    manual.engine.step()
    await running.until(b"data: ")
    running.readable.clear()
    manual.engine.step()
    await settle()
    look(manual, 10.1)
    running.readable.set()
    assert (await running.finish()).events[-1] == "[DONE]"


async def test_nothing_is_taken_until_it_goes_on(manual: Service) -> None:
    before = Socket(manual.app).start()
    await before.until_true(lambda: before.sent)
    look(manual, 10.1)
    for path in ("/health", "/ready", "/v1/models"):
        reply = await get(manual.app, path)
        assert (reply.status, reply.error["code"]) == (503, "engine_stalled")
        assert int(reply.headers["retry-after"]) > 0
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
    ]
    for path, body in bodies:
        reply = await post(manual.app, path, body)
        assert (reply.status, reply.headers["x-quire-error"]) == (503, "engine_stalled")
        assert int(reply.headers["retry-after"]) > 0
    late = Socket(manual.app).start()
    await late.until_true(lambda: late.sent)
    assert late.sent[0]["status"] == 503
    before.create()
    refusal = await before.until_type("error")
    assert (refusal["status"], refusal["error"]["code"]) == (503, "engine_stalled")
    assert refusal["error"]["headers"]["retry-after"]
    assert not manual.engine.streams
    look(manual, 0.0)
    for path in ("/health", "/ready", "/v1/models"):
        assert (await get(manual.app, path)).status == 200
    before.create(max_output_tokens=1)
    await manual.engine.until_added(1)
    manual.engine.step()
    await before.until_type("response.incomplete")
    before.leave()


async def test_a_request_that_gets_in_all_the_same_ends(manual: Service) -> None:
    """It was checked before the engine was found to be stalled, and prepared until after that."""
    look(manual, 10.1)
    look(manual, 0.0)
    running = await started(manual, ENDLESS)
    look(manual, 10.1)
    reply = await running.finish()
    assert (reply.status, reply.error["code"]) == (503, "engine_stalled")


@pytest.mark.parametrize(("device", "most"), [("cpu", DEFAULT_TIMEOUT_ON_CPU), ("GPU", DEFAULT_TIMEOUT)])
def test_by_itself_it_waits_longer_for_a_cpu(tokenizer: Tokenizer, device: str, most: float) -> None:
    engine = FakeEngine(structs.replace(make_info(tokenizer), device=device)).become_ready()
    watchdog = Watchdog(None, lambda: 0.0)
    for seconds, stalled in ((most, False), (most + 0.1, True), (0.0, False)):
        engine.stalled = seconds
        watchdog.look(engine)
        assert is_stalled(watchdog) == stalled


@given(st.lists(st.tuples(st.sampled_from([0.1, 0.5, 4.0, 30.0]), st.booleans()), max_size=40))
def test_time_in_which_nobody_looked_does_not_count(
    tokenizer: Tokenizer, looks: list[tuple[float, bool]]
) -> None:
    """A process that was stopped itself gives the engine all the timeout, unless that was stalled before."""
    now, stepped, seen, stalled = 100.0, 100.0, 100.0, False
    engine = FakeEngine(make_info(tokenizer))
    watchdog = Watchdog(2.0, lambda: now)
    watchdog.look(engine)
    for seconds, steps in looks:
        now += seconds
        if steps:
            stepped = now
        if seconds > 1 and not stalled:
            seen = now
        engine.stalled = now - stepped
        watchdog.look(engine)
        stalled = now - stepped > 2 and now - seen >= 2
        assert is_stalled(watchdog) == stalled


def test_while_it_drains(make_live: Callable[..., Live]) -> None:
    """An engine that sticks when the server has been told to end does not hold it up."""
    live = make_live(auto=False, shutdown_timeout=300.0)
    with opened(live) as client:
        create(client)
        until(client, "response.created")
        live.server.stop_soon()
        live.wait(lambda: live.server.state.draining)
        live.engine.stalled = DEFAULT_TIMEOUT_ON_CPU + 1
        assert "--stall-timeout" in until(client, "response.failed")[-1]["response"]["error"]["message"]
    live.thread.join(20)
    assert live.end() == 0
