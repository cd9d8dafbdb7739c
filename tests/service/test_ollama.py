"""/api/*, as Ollama's own client uses it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import ollama
import pytest

from quire.engine.messages import Output
from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers, tool_templates
from tests.service.asgi import Reply, exchange, get, post
from tests.service.conftest import CHAT_TEMPLATE, Service
from tests.service.live import Live
from tests.service.test_tool_parser import hermes
from tests.service.test_tools import make_room

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(live: Live) -> ollama.Client:
    return ollama.Client(live.url, headers={"Authorization": "Bearer key"})


def test_models(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["tiny"]
    (running,) = client.ps().models
    assert (running.model, running.context_length) == ("tiny", 400)
    shown = client.show("tiny")
    assert shown.modelinfo is not None and shown.modelinfo["llama.context_length"] == 400
    assert shown.capabilities == ["completion"]
    with pytest.raises(ollama.ResponseError) as missing:
        client.show("other")
    assert (missing.value.status_code, "not served here" in missing.value.error) == (404, True)


def test_chat(client: ollama.Client) -> None:
    """A name may have a tag; a stream's objects are the whole answer."""
    asked: Any = {"model": "tiny:latest", "messages": HELLO, "options": {"num_predict": 9, "seed": 1}}
    whole = client.chat(**asked)
    assert whole.message.role == "assistant" and whole.message.content
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 9)
    *parts, last = client.chat(**asked, stream=True)
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert not any(part.done for part in parts)
    assert (last.done, last.done_reason, last.message.content) == (True, "length", "")
    assert (last.prompt_eval_count, last.eval_count) == (whole.prompt_eval_count, 9)
    assert last.total_duration and last.total_duration >= (last.eval_duration or 0) > 0


def test_generate(client: ollama.Client) -> None:
    reply = client.generate("tiny", "ab", system="be kind", options={"num_predict": 4})
    assert reply.response and reply.eval_count == 4
    assert client.generate("tiny", "ab", raw=True, options={"num_predict": 4}).response == "abab"
    assert client.generate("tiny").done_reason == "load"


@pytest.fixture
def calling(make_live: Callable[..., Live]) -> Iterator[ollama.Client]:
    """A model that says something, calls a tool, and ends."""
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(tool_templates.HERMES, {}))
    said = f"I look.\n{hermes('get_weather', json.dumps({'city': 'Bern'}))}<|end|>"
    tokens = tokenizer.encode(said, add_special_tokens=False)
    live = make_live(script=lambda prompt, params, index: tokens)
    live.server.state.tokenizer = tokenizer
    make_room(live.engine)
    yield ollama.Client(live.url)


def get_weather(city: str) -> str:
    """Tell how warm it is.

    Args:
        city: The place.
    """
    return f"21 °C in {city}"


@pytest.mark.parametrize("stream", [False, True])
def test_tools(calling: ollama.Client, stream: bool) -> None:
    """A call comes as a whole, streamed too, and its result goes back by the tool's name."""
    answer: Any = calling.chat("tiny", HELLO, tools=[get_weather], stream=stream)
    parts = list(answer) if stream else [answer]
    (call,) = [call for part in parts for call in part.message.tool_calls or []]
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Bern"})
    message = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather("Bern")}
    assert calling.chat("tiny", [*HELLO, message, result], tools=[get_weather]).message.content == "I look."


def test_a_call_comes_back_as_open_webui_sends_it(calling: ollama.Client) -> None:
    call = {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": {"city": "Bern"}}}
    result = {"role": "tool", "content": get_weather("Bern"), "tool_call_id": "call_1"}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call], "content": ""}, result]
    reply = calling._client.post("/api/chat", json={"model": "tiny", "messages": messages, "stream": False})
    assert reply.is_success, reply.text


def objects_of(reply: Reply) -> list[dict[str, Any]]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.body.decode().removesuffix("\n").split("\n")]


@pytest.mark.anyio
async def test_options_reach_the_engine(service: Service, tokenizer: Tokenizer) -> None:
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "repeat_penalty": 1.5}
    options |= {"num_predict": 4, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    inert = {"num_ctx": 4096, "num_gpu": 99, "mirostat": 0, "typical_p": 1.0, "use_mmap": True}
    body = {
        "model": "tiny",
        "messages": HELLO,
        "options": options | inert,
        "keep_alive": "5m",
        "stream": False,
    }
    reply = await post(service.app, "/api/chat", body)
    assert reply.status == 200, reply.body
    ignored = ["keep_alive", "options.num_ctx", "options.num_gpu", "options.use_mmap"]
    assert sorted(reply.headers["x-quire-ignored"].split(", ")) == ignored
    (stream,) = service.engine.streams
    params = stream.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.25, 0.125)
    assert (params.max_tokens, params.seed, params.repetition_penalty) == (4, 3, 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    prompt = tokenizer.decode(stream.prompt, skip_special_tokens=False)
    assert prompt == "<|user|>hello<|assistant|>"


@pytest.mark.anyio
async def test_without_a_limit_an_answer_may_fill_the_context(service: Service) -> None:
    for limit in ({}, {"num_predict": -1}, {"num_predict": 100000}):
        await post(service.app, "/api/chat", {"model": "tiny", "messages": HELLO, "options": limit})
        stream = service.engine.streams[-1]
        assert stream.params.max_tokens == 400 - len(stream.prompt)


@pytest.mark.anyio
async def test_a_format_is_enforced(service: Service) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form, word in (("json", "object"), (schema, "integer")):
        body = {"model": "tiny", "messages": HELLO, "format": form, "options": {"num_predict": 4}}
        await post(service.app, "/api/chat", body)
        assert word in service.engine.streams[-1].params.grammar


@pytest.mark.anyio
async def test_logprobs(service: Service) -> None:
    body = {
        "model": "tiny",
        "messages": HELLO,
        "logprobs": True,
        "top_logprobs": 2,
        "options": {"num_predict": 3},
    }
    objects = objects_of(await post(service.app, "/api/chat", body))
    entries = [entry for each in objects for entry in each.get("logprobs", [])]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2, 2, 2]


@pytest.mark.anyio
async def test_failure_in_mid_stream_is_one_last_object(make_service: Callable[..., Service]) -> None:
    service = make_service(auto=False)
    running = exchange(service.app, "/api/chat", {"model": "tiny", "messages": HELLO})
    await service.engine.until_added(1)
    for _ in range(3):
        service.engine.step()
    await running.until(b'"done":false')
    (stream,) = service.engine.streams
    stream.push(Output(stream.request_id, 0, [], finish_reason="error", error="the logits are not finite"))
    *parts, last = objects_of(await running.finish())
    assert list(last) == ["error", "code"]  # in this order: a router looks for a line that begins so
    assert "not finite" in last["error"] and last["code"] == "engine_error"
    assert not any("error" in part or part["done"] for part in parts)


@pytest.mark.anyio
async def test_a_model_without_a_template_goes_on(service: Service) -> None:
    service.state.tokenizer = Tokenizer(tiny_tokenizers.byte_level(), None)
    body = {"model": "tiny", "prompt": "ab", "options": {"num_predict": 4}, "stream": False}
    assert (await post(service.app, "/api/generate", body)).json()["response"] == "abab"


@pytest.mark.anyio
async def test_version(service: Service) -> None:
    assert (await get(service.app, "/api/version")).json()["version"].count(".") == 2


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/api/chat", {"options": {"num_predict": 0}}, "num_predict"),
    ("/api/chat", {"options": {"mirostat": 2}}, "mirostat is not supported: leave it out, or give 0, which"),
    ("/api/chat", {"options": {"tfs_z": 0.5}}, "tfs_z is not supported: leave it out, or give 1, which"),
    (
        "/api/chat",
        {"options": {"typical_p": 0}},
        "typical_p is not supported: leave it out, or give 1, which",
    ),
    ("/api/chat", {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "repeat_last_n"),
    ("/api/chat", {"options": {"presence_penalty": 1, "repeat_last_n": 0}}, "last_n .* presence_penalty"),
    ("/api/chat", {"options": {"frequency_penalty": 1, "repeat_last_n": 64}}, "last_n .* frequency_penalty"),
    ("/api/chat", {"format": {"type": "thing"}}, "^format: .* type 'thing'"),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
        "images is not supported",
    ),
    ("/api/chat", {"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\] answers no call"),
    ("/api/chat", {"unknown": 1}, "unknown"),
    ("/api/generate", {"prompt": "a", "images": ["aGk="]}, "images is not supported"),
    ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
    ("/api/generate", {"prompt": "a", "template": "b"}, "template is not supported"),
    ("/api/generate", {"prompt": "a", "context": [1]}, "context is not supported"),
    ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, "system"),
    ("/api/show", {}, "model"),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("path", "more", "named"), REFUSED)
async def test_refusals_say_why(service: Service, path: str, more: dict[str, Any], named: str) -> None:
    common = {"/api/chat": {"model": "tiny", "messages": HELLO}, "/api/generate": {"model": "tiny"}}
    reply = await post(service.app, path, common.get(path, {}) | more)
    assert reply.status == 400
    with pytest.raises(AssertionError, match=named):
        raise AssertionError(reply.json()["error"])


@pytest.mark.anyio
async def test_a_stream_of_lines_is_not_recorded(service: Service) -> None:
    body = {"model": "tiny", "messages": HELLO}
    reply = await post(service.app, "/api/chat", body, x_stream_id="a")
    assert (reply.status, "server-sent events" in reply.json()["error"]) == (400, True)


@pytest.mark.anyio
async def test_thinking_stands_beside_the_content(make_service: Callable[..., Service]) -> None:
    template = CHAT_TEMPLATE + "{# <think> is what it begins with, unless enable_thinking is false #}"
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(template, {}))
    tokens = tokenizer.encode("<think>\nso\n</think>\n\nyes<|end|>", add_special_tokens=False)
    service = make_service(script=lambda prompt, params, index: tokens)
    service.state.tokenizer = tokenizer
    body = {"model": "tiny", "messages": HELLO, "think": True, "stream": False}
    reply = await post(service.app, "/api/chat", body)
    assert "x-quire-ignored" not in reply.headers
    assert reply.json()["message"] == {"role": "assistant", "content": "yes", "thinking": "so"}
    objects = objects_of(await post(service.app, "/api/chat", {**body, "stream": True}))
    assert "".join(each["message"].get("thinking", "") for each in objects) == "so"
    assert "".join(each["message"]["content"] for each in objects) == "yes"


@pytest.mark.anyio
async def test_no_content_type_is_asked_for_but_of_pages(service: Service) -> None:
    """As `curl -d` sends it; a page of another site could send that, too, and browsers say so."""
    body = json.dumps({"model": "tiny", "messages": HELLO, "options": {"num_predict": 1}}).encode()
    for path, more, status in (
        ("/api/chat", {}, 200),
        ("/api/chat", {"origin": "http://evil.example"}, 415),
        ("/api/chat", {"sec_fetch_site": "cross-site"}, 415),
        ("/v1/chat/completions", {}, 415),
    ):
        form = {"content_type": "application/x-www-form-urlencoded"}
        assert (await post(service.app, path, body, **form, **more)).status == status
