"""What happens to a request whose client leaves or stalls, or whose engine fails: exactly one end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from quire.engine.messages import Output
from quire.service.errors import not_ready
from quire.service.http.connection import ClientGone
from tests.service.asgi import Exchange, exchange, post, settle
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
ENDLESS: dict[str, Any] = {"prompt": "abc", "max_tokens": 300}


async def started(service: Service, body: dict[str, Any]) -> Exchange:
    """A request that the engine has, and that has had no step."""
    before = len(service.engine.streams)
    running = exchange(service.app, PATH, body)
    await service.engine.until_added(before + 1)
    return running


@pytest.fixture
async def manual(make_service: Callable[..., Service]) -> Service:
    """Nothing moves until the test calls `quire.engine.schedule.draft()`."""
    return make_service(auto=False)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("prompt", ["abc", ["abc", "def"]])
async def test_client_that_leaves_aborts(manual: Service, stream: bool, steps: int, prompt: Any) -> None:
    running = await started(manual, ENDLESS | {"stream": stream, "prompt": prompt})
    await settle()
    for _ in range(steps):
        manual.engine.step()
        await settle()
    running.leave()
    assert running.task is not None
    await running.task
    assert [stream.aborted for stream in manual.engine.streams] == [True] * len(manual.engine.streams)
    assert manual.state.queue.prompts == 0
    assert not manual.state.generations
    assert manual.state.metrics.finished["abort"] == len(manual.engine.streams)
    assert b"[DONE]" not in running.body


async def test_disconnect_after_the_end_aborts_nothing(service: Service) -> None:
    running = exchange(service.app, PATH, {"prompt": "a", "max_tokens": 2, "stream": True})
    await running.until(b"[DONE]")
    running.leave()
    assert running.task is not None
    await running.task
    assert not service.engine.streams[0].aborted


async def test_headers_wait_for_the_first_token(manual: Service) -> None:
    running = await started(manual, ENDLESS | {"stream": True})
    await settle()
    assert running.sent == []
    manual.engine.die("out of memory")
    reply = await running.finish()
    assert reply.status == 500
    assert "out of memory" in reply.error["message"]


async def test_failure_in_mid_stream_is_one_event_without_done(manual: Service) -> None:
    running = await started(manual, ENDLESS | {"stream": True, "n": 2})
    manual.engine.step()
    await running.until(b"data: ")
    await settle()
    manual.engine.die("CUDA error")
    reply = await running.finish()
    *chunks, last = reply.events
    assert reply.status == 200
    assert len(chunks) == 2
    assert "choices" in chunks[0]
    assert set(last) == {"error"}
    assert last["error"]["code"] == "engine_dead"
    assert "CUDA error" in last["error"]["message"]
    assert b"[DONE]" not in reply.body
    assert running.sent[-1]["more_body"] is False
    counts = manual.state.metrics.finished
    assert (counts["error"], counts["abort"]) == (1, 0)
    refused = await post(manual.app, PATH, ENDLESS)
    assert (refused.status, refused.headers["retry-after"]) == (503, "5")


async def test_failure_of_one_prompt_ends_the_request(manual: Service) -> None:
    running = await started(manual, ENDLESS | {"prompt": ["abc", "def"]})
    first, second = manual.engine.streams
    manual.engine.step()
    await settle()
    first.push(Output(first.request_id, 0, [], finish_reason="error", error="NaN logits"))
    reply = await running.finish()
    assert reply.status == 500
    assert reply.error["code"] == "engine_error"
    assert "NaN logits" in reply.error["message"]
    assert second.aborted


async def test_poison_request_fails_alone(manual: Service) -> None:
    running = [await started(manual, ENDLESS | {"stream": True, "max_tokens": 5}) for _ in range(3)]
    manual.engine.step()
    await settle()
    poison = manual.engine.streams[1]
    poison.push(Output(poison.request_id, 0, [], finish_reason="error", error="the logits are not finite"))
    failed = await running[1].finish()
    assert "not finite" in failed.events[-1]["error"]["message"]
    for _ in range(4):
        manual.engine.step()
        await settle()
    for other in (running[0], running[2]):
        reply = await other.finish()
        assert "".join(event["choices"][0]["text"] for event in reply.events[:-1]) == "abcab"
        assert reply.events[-1] == "[DONE]"


async def test_idle_streams_get_comments(make_service: Callable[..., Service]) -> None:
    service = make_service(auto=False, keep_alive=0.02)
    running = await started(service, ENDLESS | {"stream": True, "max_tokens": 2})
    await running.until(b": keep-alive\n\n: keep-alive\n\n")  # even before the first token
    service.engine.step()
    await running.until(b'"text":"a"')
    seen = running.body
    await running.until(seen + b": keep-alive\n\n")
    service.engine.step()
    reply = await running.finish()
    assert [event["choices"][0]["text"] for event in reply.events[:-1]] == ["a", "b"]
    assert len([message for message in running.sent if message["type"] == "http.response.start"]) == 1


async def test_failure_after_a_comment_is_an_event(make_service: Callable[..., Service]) -> None:
    service = make_service(auto=False, keep_alive=0.02)
    running = await started(service, ENDLESS | {"stream": True})
    await running.until(b": keep-alive\n\n")
    service.engine.die("gone")
    reply = await running.finish()
    assert reply.status == 200
    (event,) = reply.events
    assert "gone" in event["error"]["message"]


async def test_slow_reader_gets_merged_deltas(manual: Service) -> None:
    running = await started(manual, ENDLESS | {"stream": True, "max_tokens": 20, "return_token_ids": True})
    manual.engine.step()
    await running.until(b"data: ")
    running.readable.clear()
    for _ in range(19):
        manual.engine.step()
        await settle()
    running.readable.set()
    reply = await running.finish()
    choices = [event["choices"][0] for event in reply.events[:-1]]
    assert "".join(choice["text"] for choice in choices) == ("abc" * 7)[:20]
    assert sum(len(choice["token_ids"]) for choice in choices) == 20
    assert len(choices) == 3  # before, the one that blocked, and the rest


async def test_backlog_of_a_stalled_reader_is_limited(make_service: Callable[..., Service]) -> None:
    service = make_service(auto=False, send_timeout=30.0, keep_alive=0.02, max_backlog_bytes=3000)
    running = await started(service, ENDLESS | {"stream": True, "logprobs": 5})
    running.readable.clear()
    assert running.task is not None
    steps = 0
    while not running.task.done():  # well before send_timeout, and before max_tokens
        if steps < 250:
            service.engine.step()
            steps += 1
        await asyncio.sleep(0.005)
    assert service.engine.streams[0].aborted
    assert not service.state.generations


async def test_shutdown_ends_streams_with_an_event_and_the_queued_with_a_status(manual: Service) -> None:
    streaming = await started(manual, ENDLESS | {"stream": True})
    manual.engine.step()
    await streaming.until(b"data: ")
    queued = await started(manual, ENDLESS | {"stream": True})
    whole = await started(manual, ENDLESS)
    await settle()
    for connection in list(manual.state.generations):
        connection.interrupt(not_ready("the server is shutting down"))
    last = (await streaming.finish()).events[-1]
    assert last["error"]["code"] == "not_ready"
    assert b"[DONE]" not in streaming.body
    for running in (queued, whole):
        reply = await running.finish()
        assert (reply.status, reply.error["code"]) == (503, "not_ready")
    assert all(stream.aborted for stream in manual.engine.streams)


async def test_only_the_first_interruption_counts(manual: Service) -> None:
    running = await started(manual, ENDLESS)
    await settle()
    (connection,) = manual.state.generations
    connection.interrupt(not_ready("first"))
    connection.interrupt(ClientGone("second"))
    reply = await running.finish()
    assert "first" in reply.error["message"]
    assert running.task is not None
    assert running.task.cancelling() == 0


async def test_cancellation_from_outside_is_not_swallowed(manual: Service) -> None:
    running = await started(manual, ENDLESS)
    await settle()
    assert running.task is not None
    running.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running.task
    assert manual.engine.streams[0].aborted


async def test_crowd(service: Service) -> None:
    """Many at once, of every kind; nobody gets another's tokens."""
    prompts = [f"{at % 10} b {'cd' * (at % 7)} e" for at in range(60)]
    replies = await asyncio.gather(
        *(
            post(service.app, PATH, {"prompt": prompt, "max_tokens": 9 + at % 5, "stream": at % 2 == 0})
            for at, prompt in enumerate(prompts)
        )
    )
    for at, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        tokenizer = service.state.tokenizer
        assert tokenizer is not None
        tokens = tokenizer.encode(prompt, add_special_tokens=True)
        expected = tokenizer.decode((tokens * 20)[: 9 + at % 5], skip_special_tokens=True)
        choices = (
            [event["choices"][0] for event in reply.events[:-1]] if at % 2 == 0 else reply.json()["choices"]
        )
        assert "".join(choice["text"] for choice in choices) == expected
    assert service.state.queue.prompts == 0
