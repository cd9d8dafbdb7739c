"""What a token costs, counted and not timed: one send; no task, no turn of one, no JSON call."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any

import pytest

from quire.engine.client import AsyncEngine
from quire.engine.config import EngineConfig
from quire.service.answer import encoder as chunks
from quire.service.answer.generation import Generation
from quire.service.app import create_app
from quire.service.config import ServiceConfig
from quire.service.demo import MODEL_FOLDER
from quire.service.http.eager import start_eagerly
from quire.service.state import ServerState
from quire.service.text.tokenizer import Tokenizer
from tests.service.asgi import Exchange, post
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio
SHORT, LONG = 20, 380
STREAMS = 4
BODIES = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
}


class Turns(Coroutine[Any, Any, None]):
    """A coroutine, and how often a task has resumed it."""

    def __init__(self, inner: Coroutine[Any, Any, None]) -> None:
        self.inner = inner
        self.count = 0

    def send(self, value: Any) -> Any:
        self.count += 1
        return self.inner.send(value)

    def throw(self, *error: Any) -> Any:
        self.count += 1
        return self.inner.throw(*error)

    def close(self) -> None:
        self.inner.close()

    def __await__(self) -> Generator[Any, Any, None]:
        return (yield from self.inner.__await__())


@dataclass
class Work:
    """Of all streams together."""

    sends: int = 0
    turns: int = 0
    tasks: int = 0
    encodings: int = 0


async def work_of(service: Service, monkeypatch: pytest.MonkeyPatch, path: str, tokens: int) -> Work:
    """Of `STREAMS` streams of `tokens` tokens each, from the first step of the engine on."""
    work = Work()
    encode = chunks._encode

    def counted_encode(value: Any) -> bytes:
        work.encodings += 1
        return encode(value)

    def counted_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        work.tasks += 1
        return asyncio.Task(coroutine, loop=loop, **options)

    body = BODIES[path] | {"max_tokens": tokens, "stream": True, "ignore_eos": True}
    data = chunks.msgspec.json.encode(body)
    turns: list[Turns] = []
    running = []
    before = len(service.engine.streams)
    for _ in range(STREAMS):
        each = Exchange(
            counting(service.app, turns), "POST", path, data, {"content-type": "application/json"}
        )
        running.append(each.start())
    await service.engine.until_added(before + STREAMS)
    for _ in range(20):
        await asyncio.sleep(0)
    started = sum(each.count for each in turns)
    monkeypatch.setattr(chunks, "_encode", counted_encode)
    asyncio.get_running_loop().set_task_factory(counted_task)
    for _ in range(tokens):
        service.engine.step()
        await asyncio.sleep(0)
    replies = [await each.finish() for each in running]
    asyncio.get_running_loop().set_task_factory(None)
    monkeypatch.undo()
    for reply in replies:
        assert len(reply.events) == tokens + 1
        assert reply.events[-1] == "[DONE]"
    work.turns = sum(each.count for each in turns) - started
    work.sends = sum(len(each.sent) for each in running)
    return work


def counting(app: Any, turns: list[Turns]) -> Any:
    async def call(scope: Any, receive: Any, send: Any) -> None:
        turns.append(Turns(app(scope, receive, send)))
        await turns[-1]

    return call


@pytest.mark.parametrize("path", BODIES)
async def test_more_tokens_are_more_sends_and_nothing_else(
    make_service: Callable[..., Service], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    tokens = tokenizer.encode("abc", add_special_tokens=False)
    service = make_service(auto=False, script=lambda *_: tokens * LONG)
    await work_of(service, monkeypatch, path, SHORT)  # each piece of text is encoded the first time
    short = await work_of(service, monkeypatch, path, SHORT)
    long = await work_of(service, monkeypatch, path, LONG)
    assert long.sends - short.sends == STREAMS * (LONG - SHORT)
    assert (long.turns, long.tasks, long.encodings) == (short.turns, short.tasks, short.encodings)
    assert short.turns <= 4 * STREAMS
    assert short.sends == STREAMS * (1 + SHORT)  # the headers; what ends the stream goes with its last token


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_leaves_nothing_to_the_garbage_collector(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Generation]] = []

    class Watched(Generation):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(weakref.ref(self))

    monkeypatch.setattr("quire.service.api.completions.Generation", Watched)
    engine = AsyncEngine(
        EngineConfig(model=MODEL_FOLDER), program=("quire.loadtest.servers.token_source", "0", "4")
    )
    await engine.start()
    state = ServerState(ServiceConfig(served_model_names=("none",)))
    state.set_engine(engine)
    state.tokenizer = Tokenizer.from_folder(MODEL_FOLDER)
    async for _ in engine.watch_progress():
        pass
    gc.disable()
    try:
        for prompt in ("abc", ["abc", "def"]):
            body = {"prompt": prompt, "max_tokens": 20, "stream": stream}
            reply = await post(create_app(state), "/v1/completions", body)
            assert reply.status == 200
        assert [reference() for reference in made] == [None, None]
    finally:
        gc.enable()
        await engine.stop()


async def test_what_piles_up_is_one_chunk(make_service: Callable[..., Service]) -> None:
    """An engine that is ahead costs less for each token, so a server that has fallen behind catches up."""
    service = make_service(auto=False)
    body = b'{"prompt": "abc", "max_tokens": 300, "stream": true}'
    running = Exchange(service.app, "POST", "/v1/completions", body, {"content-type": "application/json"})
    running.start()
    await service.engine.until_added(1)
    for _ in range(20):
        await asyncio.sleep(0)
    for _ in range(300):
        service.engine.step()
    reply = await running.finish()
    assert "".join(event["choices"][0]["text"] for event in reply.events[:-1]) == "abc" * 100
    assert len(reply.events) == 2


async def test_eager_start_runs_up_to_the_first_wait() -> None:
    seen = []
    gate = asyncio.Event()

    async def work(waits: bool) -> None:
        seen.append("begun")
        if waits:
            await gate.wait()
            await asyncio.sleep(0)
        seen.append("done")

    assert start_eagerly(work(False)) is None
    assert seen == ["begun", "done"]
    rest = start_eagerly(work(True))
    assert rest is not None
    assert seen == ["begun", "done", "begun"]
    gate.set()
    await rest
    assert seen == ["begun", "done", "begun", "done"]


async def test_eager_start_passes_errors_and_cancellations_on() -> None:
    seen = []

    async def fails() -> None:
        raise ValueError("at once")

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    with pytest.raises(ValueError, match="at once"):
        start_eagerly(fails())
    rest = start_eagerly(waits())
    assert rest is not None
    task = asyncio.ensure_future(rest)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled"]
