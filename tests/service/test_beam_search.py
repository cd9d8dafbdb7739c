"""Beam search parameters, and beams as their client gets them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from quire.engine.messages import SamplingParams
from quire.service.text.tokenizer import Tokenizer
from tests.service.asgi import exchange, get, post
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio
COMPLETION = ("/v1/completions", {"prompt": "x"})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
BOTH = pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT])
BEAMS = {"use_beam_search": True, "max_tokens": 5}


@pytest.fixture
def searching(make_service: Callable[..., Service], tokenizer: Tokenizer) -> Service:
    """Beams "ab", which ends, and "bbbbb", which is cut."""
    said = [tokenizer.encode(text, add_special_tokens=False) for text in ("ab<|end|>", "b")]

    def script(prompt: list[int], params: Any, index: int) -> list[int]:
        return said[min(index, 1)] * params.max_tokens

    return make_service(script=script)


async def asked(service: Service, path: str, body: dict[str, Any]) -> SamplingParams:
    reply = await post(service.app, path, body)
    assert reply.status == 200, reply.body
    return service.engine.streams[-1].params


@BOTH
async def test_parameters_reach_the_engine(service: Service, path: str, body: dict[str, Any]) -> None:
    params = await asked(service, path, {**body, **BEAMS})
    assert (params.beam_width, params.n, params.temperature) == (1, 1, 0.0)
    assert (params.length_penalty, params.early_stopping, params.logprobs) == (1.0, False, None)
    params = await asked(service, path, {**body, **BEAMS, "n": 3, "temperature": 0})
    assert (params.beam_width, params.n) == (3, 3)
    more = {"n": 2, "best_of": 4, "length_penalty": -0.5, "min_tokens": 2, "ignore_eos": True}
    params = await asked(service, path, {**body, **BEAMS, **more, "stop_token_ids": [9]})
    assert (params.beam_width, params.n, params.length_penalty) == (4, 2, -0.5)
    assert (params.min_tokens, params.ignore_eos, params.stop_token_ids) == (2, True, (9,))
    for early in (True, False, "never"):
        params = await asked(service, path, {**body, **BEAMS, "early_stopping": early})
        assert params.early_stopping == early
        assert type(params.early_stopping) is type(early)


async def test_neutral_values_may_be_given(service: Service) -> None:
    neutral = {"top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "stop": []}
    body = {"prompt": "x", **BEAMS, **neutral, "repetition_penalty": 1, "logit_bias": {}, "seed": 3}
    await asked(service, "/v1/completions", body)


async def test_without_beams_no_beam_width_is_asked_for(service: Service) -> None:
    for given in (None, False):
        body = {"prompt": "x", "use_beam_search": given, "length_penalty": None, "early_stopping": None}
        params = await asked(service, "/v1/completions", body)
        assert (params.beam_width, params.temperature) == (0, 1.0)


@BOTH
async def test_beams_come_back_best_first(searching: Service, path: str, body: dict[str, Any]) -> None:
    reply = (await post(searching.app, path, {**body, **BEAMS, "n": 2, "best_of": 3})).json()
    first, second = reply["choices"]
    texts = [
        choice["text"] if "text" in choice else choice["message"]["content"] for choice in (first, second)
    ]
    assert texts == ["ab", "bbbbb"]
    assert [choice["index"] for choice in (first, second)] == [0, 1]
    assert [choice["finish_reason"] for choice in (first, second)] == ["stop", "length"]
    assert [choice["cumulative_logprob"] for choice in (first, second)] == [-1.5, -3.0]
    assert reply["usage"]["completion_tokens"] == 3 + 5


@BOTH
async def test_streamed_beams_are_one_delta_each(searching: Service, path: str, body: dict[str, Any]) -> None:
    options = {"n": 2, "best_of": 4, "stream": True, "stream_options": {"include_usage": True}}
    reply = await post(searching.app, path, {**body, **BEAMS, **options, "return_token_ids": True})
    *chunks, usage, done = reply.events
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == 3 + 5
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices]
    assert texts == ["ab", "bbbbb"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
    assert [choice["cumulative_logprob"] for choice in choices] == [-1.5, -3.0]
    assert [len(choice["token_ids"]) for choice in choices] == [3, 5]
    if "delta" in choices[0]:
        assert [choice["delta"]["role"] for choice in choices] == ["assistant"] * 2


async def test_nothing_streams_before_the_search_ends(
    make_service: Callable[..., Service], tokenizer: Tokenizer
) -> None:
    service = make_service(auto=False)
    running = exchange(service.app, "/v1/completions", {"prompt": "x", **BEAMS, "n": 2, "stream": True})
    await service.engine.until_added(1)
    for _ in range(4):
        service.engine.step()
        await asyncio.sleep(0)
    assert running.sent == []
    service.engine.step()
    reply = await running.finish()
    assert [event["choices"][0]["text"] for event in reply.events[:-1]] == ["xxxxx", "xxxxx"]


async def test_client_that_leaves_a_search_aborts_it(make_service: Callable[..., Service]) -> None:
    service = make_service(auto=False)
    running = exchange(service.app, "/v1/completions", {"prompt": "x", **BEAMS, "n": 2})
    await service.engine.until_added(1)
    service.engine.step()
    running.leave()
    assert running.task is not None
    await running.task
    assert service.engine.streams[0].aborted
    assert service.state.queue.prompts == 0


async def test_several_prompts_and_echo(searching: Service) -> None:
    body = {"prompt": ["x", "y"], **BEAMS, "n": 2, "echo": True}
    choices = (await post(searching.app, "/v1/completions", body)).json()["choices"]
    assert [choice["text"] for choice in choices] == ["xab", "xbbbbb", "yab", "ybbbbb"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["cumulative_logprob"] for choice in choices] == [-1.5, -3.0] * 2


async def test_metrics_of_a_search(searching: Service) -> None:
    await post(searching.app, "/v1/completions", {"prompt": "x", **BEAMS, "n": 2})
    text = (await get(searching.app, "/metrics")).body.decode()
    assert 'vllm:generation_tokens_total{model_name="tiny"} 8.0' in text
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0' in text
    assert 'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0' in text
    assert 'vllm:inter_token_latency_seconds_count{model_name="tiny"} 0.0' in text


@BOTH
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 1),  # less than n
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.1),
        ("logit_bias", {"7": 1}),
        ("stop", "a"),
        ("stop", ["a", "b"]),
        ("max_tokens", 0),
        ("length_penalty", 5.5),
        ("length_penalty", "1"),
        ("length_penalty", True),
        ("early_stopping", "maybe"),
        ("early_stopping", 1),
    ],
)
async def test_refused_with_beams(
    service: Service, path: str, body: dict[str, Any], name: str, value: Any
) -> None:
    reply = await post(service.app, path, {**body, **BEAMS, "n": 2, name: value})
    assert (reply.status, reply.error["param"]) == (400, name)
    assert name in reply.error["message"]
    assert not service.engine.streams


@pytest.mark.parametrize(("path", "body", "value"), [(*COMPLETION, 0), (*COMPLETION, 2), (*CHAT, True)])
async def test_logprobs_are_refused_with_beams(
    service: Service, path: str, body: dict[str, Any], value: Any
) -> None:
    reply = await post(service.app, path, {**body, **BEAMS, "logprobs": value})
    assert (reply.status, reply.error["param"]) == (400, "logprobs")
    assert "use_beam_search" in reply.error["message"]


async def test_empty_echo_is_refused_with_beams(service: Service) -> None:
    body = {"prompt": "x", **BEAMS, "max_tokens": 0, "echo": True}
    reply = await post(service.app, "/v1/completions", body)
    assert (reply.status, reply.error["param"]) == (400, "max_tokens")


@BOTH
@pytest.mark.parametrize(("name", "value"), [("length_penalty", 2.0), ("early_stopping", True)])
@pytest.mark.parametrize("given", [None, False])
async def test_refused_without_beams(
    service: Service, path: str, body: dict[str, Any], name: str, value: Any, given: bool | None
) -> None:
    reply = await post(service.app, path, {**body, "use_beam_search": given, name: value})
    assert (reply.status, reply.error["param"]) == (400, name)
    assert reply.error["message"] == f"{name} needs use_beam_search"
