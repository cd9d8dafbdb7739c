"""POST /v1/responses, as JSON and as events; OpenAI's own types say what is well formed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from quire.service.text.tokenizer import Tokenizer
from tests.service.asgi import Reply, exchange, post
from tests.service.conftest import Service
from tests.service.live import Live

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def events_of(reply: Reply) -> list[dict[str, Any]]:
    """All events, each of a type that OpenAI has, named by its `event:` line and numbered in order."""
    events = []
    for block in reply.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = EVENT.validate_json(data.removeprefix("data: "))
        assert name == f"event: {event.type}"
        assert event.sequence_number == len(events)
        events.append(event.model_dump())
    return events


def said(tokenizer: Tokenizer, text: str, count: int) -> str:
    """What the echoing engine answers to this prompt."""
    prompt = tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.decode((prompt * count)[:count], skip_special_tokens=True)


async def test_reply(service: Service, tokenizer: Tokenizer) -> None:
    body = {
        "input": "hello",
        "instructions": "be kind",
        "max_output_tokens": 40,
        "temperature": 0.5,
        "top_p": 0.25,
        "seed": 7,
        "ignore_eos": True,
        "metadata": {"a": "b"},
        "store": False,
        "text": {"format": {"type": "text"}},
    }
    reply = (await post(service.app, PATH, body)).json()
    Response.model_validate(reply, strict=True)
    (stream,) = service.engine.streams
    params = stream.params
    assert (params.temperature, params.top_p, params.seed, params.ignore_eos) == (0.5, 0.25, 7, True)
    prompt = "<|assistant|>be kind<|user|>hello<|assistant|>"
    assert stream.prompt == tokenizer.encode(prompt, add_special_tokens=False)
    (message,) = reply["output"]
    assert message["content"][0]["text"] == said(tokenizer, prompt, 40)
    assert (reply["status"], message["status"]) == ("incomplete", "incomplete")
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reply["instructions"] == "be kind"
    assert reply["metadata"] == {"a": "b"}
    assert (reply["temperature"], reply["top_p"], reply["max_output_tokens"]) == (0.5, 0.25, 40)
    usage = reply["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(stream.prompt), 40)
    assert usage["total_tokens"] == len(stream.prompt) + 40


async def test_end_by_the_model_is_completed(service: Service, tokenizer: Tokenizer) -> None:
    eos = tokenizer.encode("<|end|>", add_special_tokens=False)
    service.engine.script = lambda prompt, params, index: [65, 66, *eos]
    reply = (await post(service.app, PATH, {"input": "hello"})).json()
    assert (reply["status"], reply["incomplete_details"]) == ("completed", None)
    assert reply["usage"]["output_tokens"] == 3


async def test_max_output_tokens_left_out_is_the_rest_of_the_context(service: Service) -> None:
    await post(service.app, PATH, {"input": "hello"})
    (stream,) = service.engine.streams
    assert stream.params.max_tokens == 400 - len(stream.prompt)


async def test_items(service: Service, tokenizer: Tokenizer) -> None:
    """A conversation, with an earlier response's output as it came."""
    first = (await post(service.app, PATH, {"input": "hello", "max_output_tokens": 8})).json()
    answer = first["output"][0]["content"][0]["text"]
    items = [
        {"role": "developer", "content": "a"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        *first["output"],
        {"role": "user", "content": [{"type": "input_text", "text": text} for text in "bc"]},
    ]
    await post(service.app, PATH, {"input": items, "max_output_tokens": 1})
    prompt = f"<|assistant|>a<|user|>hello<|assistant|>{answer}<|user|>b\nc<|assistant|>"
    assert service.engine.streams[1].prompt == tokenizer.encode(prompt, add_special_tokens=False)


@pytest.mark.parametrize("count", [1, 12])
async def test_events(service: Service, count: int) -> None:
    body = {"input": "hello", "max_output_tokens": count}
    whole = (await post(service.app, PATH, body)).json()
    streamed = await post(service.app, PATH, {**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = events_of(streamed)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(event["delta"] for event in events if "delta" in event) == text
    assert events[-4]["text"] == events[-3]["part"]["text"] == text
    assert events[0]["response"]["output"] == []
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]]
    assert last["usage"]["output_tokens"] == count
    assert {event["item_id"] for event in events if "item_id" in event} == {last["output"][0]["id"]}
    assert {event["response"]["id"] for event in events if "response" in event} == {last["id"]}


async def test_merged_deltas(make_service: Callable[..., Service]) -> None:
    """A client that reads late misses no text."""
    service = make_service(auto=False)
    running = exchange(service.app, PATH, {"input": "hello", "max_output_tokens": 9, "stream": True})
    await service.engine.until_added(1)
    for _ in range(9):
        service.engine.step()
    events = events_of(await running.finish())
    (delta,) = [event["delta"] for event in events if "delta" in event]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == delta


@pytest.mark.parametrize("steps", [0, 4])
async def test_failure_is_the_last_event(make_service: Callable[..., Service], steps: int) -> None:
    service = make_service(auto=False, keep_alive=0.02)
    running = exchange(service.app, PATH, {"input": "hello", "stream": True})
    await service.engine.until_added(1)
    for _ in range(steps):
        service.engine.step()
    await running.until(b"delta" if steps else b": keep-alive\n\n")
    service.engine.die("CUDA error")
    reply = await running.finish()
    comments = b": keep-alive\n\n"
    events = events_of(Reply(reply.status, reply.headers, reply.body.replace(comments, b"")))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert "CUDA error" in last["response"]["error"]["message"]
    assert last["response"]["error"]["cause"] == "engine_dead"
    assert all(item["status"] == "incomplete" for item in last["response"]["output"])
    assert b"[DONE]" not in reply.body


async def test_failure_before_the_first_event_is_a_status(make_service: Callable[..., Service]) -> None:
    service = make_service(auto=False)
    running = exchange(service.app, PATH, {"input": "hello", "stream": True})
    await service.engine.until_added(1)
    service.engine.die("CUDA error")
    reply = await running.finish()
    assert (reply.status, reply.error["code"]) == (500, "engine_dead")


async def test_client_that_leaves_aborts(make_service: Callable[..., Service]) -> None:
    service = make_service(auto=False)
    running = exchange(service.app, PATH, {"input": "hello", "stream": True})
    await service.engine.until_added(1)
    service.engine.step()
    await running.until(b"response.created")
    running.leave()
    assert running.task is not None
    await running.task
    assert service.engine.streams[0].aborted
    assert not service.state.generations


async def test_a_refusal_goes_back_as_openai_gives_it(service: Service, tokenizer: Tokenizer) -> None:
    refusal = {"type": "refusal", "refusal": "no"}
    answer = {"type": "output_text", "text": "but", "annotations": []}
    items = [
        {"role": "user", "content": "a"},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [refusal, answer]},
        {"role": "user", "content": "b"},
    ]
    reply = await post(service.app, PATH, {"input": items, "max_output_tokens": 1})
    assert reply.status == 200, reply.body
    prompt = "<|user|>a<|assistant|>no\nbut<|user|>b<|assistant|>"
    assert service.engine.streams[0].prompt == tokenizer.encode(prompt, add_special_tokens=False)


BAD: list[tuple[str, Any]] = [
    ("input", 5),
    ("input", []),
    ("input", None),
    ("input", [{"role": "user"}]),
    ("input", [{"role": "tool", "content": "x"}]),
    ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
    ("input", [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}]),
    ("input", [{"role": "assistant", "content": [{"type": "input_text", "text": "x"}]}]),
    ("input", [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]),
    ("input", [{"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}]),
    ("input", [{"role": "assistant", "content": [{"type": "refusal", "refusal": "x", "text": "x"}]}]),
    ("input", [{"role": "assistant", "content": [{"type": "output_text"}]}]),
    ("input", [{"type": "item_reference", "id": "x"}]),
    ("instructions", 5),
    ("max_output_tokens", 0),
    ("max_output_tokens", 500),
    ("temperature", 2.5),
    ("top_p", 0),
    ("stream", 1),
    ("seed", 1 << 63),
    ("ignore_eos", "yes"),
    ("background", True),
    ("truncation", "auto"),
    ("logit_bias", {"1000": 1.0}),
    ("stop_token_ids", [1000]),
    ("metadata", {"a": 5}),
    ("metadata", {"a" * 65: "b"}),
    ("metadata", {"a": "b" * 513}),
    ("metadata", {str(at): "" for at in range(17)}),
    ("text", {"format": {"type": "yaml"}}),
    ("text", {"verbosity": "loud"}),
    ("conversation", "conv_1"),
    ("background", True),
    ("truncation", "auto"),
    ("previous_response_id", "resp_1"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
async def test_bad_values_are_named(service: Service, name: str, value: Any) -> None:
    reply = await post(service.app, PATH, {"input": "hello", name: value})
    assert reply.status == 400
    assert reply.error["param"].split(".")[0].split("[")[0] == name
    assert name in reply.error["message"]
    assert "Invalid enum" not in reply.error["message"] or "strings allowed here" in reply.error["message"]
    assert not service.engine.streams


@pytest.mark.parametrize(
    "name",
    [
        *("messages", "max_tokens", "n"),
    ],
)
async def test_unknown_fields_are_named(service: Service, name: str) -> None:
    reply = await post(service.app, PATH, {"input": "hello", name: 1})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, name, "unknown_field")


async def test_other_models_and_full_queues(make_service: Callable[..., Service]) -> None:
    service = make_service(auto=False, max_num_queued_reqs=1)
    assert (await post(service.app, PATH, {"input": "a", "model": "other"})).status == 404
    running = exchange(service.app, PATH, {"input": "hello"})
    await service.engine.until_added(1)
    assert (await post(service.app, PATH, {"input": "a"})).status == 429
    running.leave()


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="key", max_retries=0) as client:
        yield client


def test_openai_client(client: openai.OpenAI) -> None:
    reply = client.responses.create(model="tiny", input="hello", max_output_tokens=30)
    assert reply.status == "incomplete"
    assert "hello" in reply.output_text
    items: Any = [{"role": "user", "content": "hello"}, *reply.output, {"role": "user", "content": "more"}]
    again = client.responses.create(model="tiny", input=items, max_output_tokens=60)
    assert again.output_text.startswith(f"hello{reply.output_text}more")


def test_openai_client_streams(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="tiny", input="hello", max_output_tokens=30)
    text = ""
    for event in client.responses.create(model="tiny", input="hello", max_output_tokens=30, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == whole.output_text
    with client.responses.stream(model="tiny", input="hello", max_output_tokens=30) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
    assert snapshots[-1] == whole.output_text


def test_openai_async_client(live: Live) -> None:
    async def one(client: openai.AsyncOpenAI, at: int) -> str:
        text = ""
        async with client.responses.stream(model="tiny", input=f"{at} a", max_output_tokens=12) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    text += event.delta
        return text

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="key", max_retries=0) as client:
            return await asyncio.gather(*(one(client, at) for at in range(8)))

    texts = asyncio.run(all_of_them())
    assert [text[0] for text in texts] == [str(at) for at in range(8)]
