"""Log-probabilities of an answer: as many as are bearable, made once for a prompt, and beside the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from quire.service.answer import logprobs
from quire.service.api import completions
from quire.service.api.openapi import describe
from quire.service.json_fields import MAX_ECHOED_LOGPROBS, MAX_REPLY_LOGPROBS
from quire.service.text.tokenizer import Tokenizer
from tests.service.asgi import post
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def large(make_service: Callable[..., Service], tokenizer: Tokenizer) -> Service:
    """With room for long texts, all of which end at once."""
    end = tokenizer.encode("<|end|>", add_special_tokens=False)
    service = make_service(script=lambda prompt, params, index: end)
    service.engine._info = replace(service.engine._info, max_model_len=1 << 20, num_blocks=1 << 20)
    service.engine.info = service.engine._info
    return service


REFUSED: list[tuple[str, dict[str, Any], str, int]] = [
    (COMPLETIONS, {"prompt": [5] * 100, "prompt_logprobs": 20, "n": 128}, "prompt_logprobs", 100 * 21 * 128),
    (COMPLETIONS, {"prompt": [[5] * 20_000] * 2, "prompt_logprobs": 7}, "prompt_logprobs", 40_000 * 8),
    (COMPLETIONS, {"prompt": [5] * 100, "logprobs": 20, "echo": True, "n": 128}, "logprobs", 116 * 21 * 128),
    (COMPLETIONS, {"prompt": "a", "logprobs": 20, "max_tokens": 1000, "n": 13}, "logprobs", 13 * 21 * 1000),
    (COMPLETIONS, {"prompt": ["a"] * 800, "logprobs": 20}, "logprobs", 800 * 16 * 21),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2049, "best_of": 128}, "best_of", 2049 * 128),
    (
        COMPLETIONS,
        {"prompt": [5] * 1000, "logprobs": 20, "echo": True, "stream": True},
        "logprobs",
        1000 * 21,
    ),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "max_tokens": 1 << 19}, "logprobs", 1 << 19),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "n": 3, "max_tokens": 100_000}, "logprobs", 300_000),
]


async def test_too_many_are_refused_with_the_numbers(large: Service) -> None:
    for path, body, param, total in REFUSED:
        reply = await post(large.app, path, body)
        assert (reply.status, reply.error["param"]) == (400, param), body
        limit = MAX_ECHOED_LOGPROBS if body.get("stream") else MAX_REPLY_LOGPROBS
        assert f"up to {total} " in reply.error["message"] and f"more than {limit}:" in reply.error["message"]
    assert large.engine.streams == []


async def test_a_stream_that_gives_them_as_they_come_has_no_limit(large: Service) -> None:
    body = {"prompt": "a", "logprobs": 20, "max_tokens": 20_000, "n": 4, "stream": True}
    assert (await post(large.app, COMPLETIONS, body)).status == 200


async def test_a_chat_without_max_tokens_is_as_long_as_they_allow(large: Service) -> None:
    asked: list[tuple[dict[str, Any], int]] = [
        ({}, (1 << 20)),
        ({"logprobs": True, "top_logprobs": 20}, MAX_REPLY_LOGPROBS // 21),
        ({"logprobs": True, "top_logprobs": 1, "n": 4}, MAX_REPLY_LOGPROBS // 8),
        ({"best_of": 64}, MAX_REPLY_LOGPROBS // 64),
        ({"logprobs": True, "top_logprobs": 20, "stream": True}, 1 << 20),
    ]
    for fields, most in asked:
        assert (await post(large.app, CHAT, {"messages": MESSAGES, **fields})).status == 200
        stream = large.engine.streams[-1]
        assert stream.params.max_tokens == min(most, (1 << 20) - len(stream.prompt))
    fields = {"logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20}
    assert (await post(large.app, CHAT, {"messages": MESSAGES, **fields})).status == 200
    stream = large.engine.streams[-1]
    assert stream.params.max_tokens == (MAX_REPLY_LOGPROBS - 21 * len(stream.prompt)) // 21


async def test_the_limits_are_told() -> None:
    schemas = describe("1")["components"]["schemas"]
    for kind, names in (
        ("CompletionRequest", ("logprobs", "prompt_logprobs")),
        ("ChatRequest", ("top_logprobs", "prompt_logprobs")),
    ):
        for name in names:
            told = str(schemas[kind]["properties"][name])
            assert str(MAX_REPLY_LOGPROBS) in told and str(MAX_ECHOED_LOGPROBS) in told


async def test_they_are_made_once_for_a_prompt_and_beside_the_loop(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    own, own_echo = logprobs._prompt_logprob, completions.logprobs_of

    def watched(*given: Any) -> Any:
        made.append(threading.current_thread().name)
        return own(*given)

    def watched_echo(generation: Any, entries: Any) -> Any:
        made.extend(len(entries) * [threading.current_thread().name])
        return own_echo(generation, entries)

    monkeypatch.setattr(logprobs, "_prompt_logprob", watched)
    monkeypatch.setattr(completions, "logprobs_of", watched_echo)
    prompt = list(range(40, 90))
    body = {"prompt": [prompt, prompt[1:]], "prompt_logprobs": 5, "n": 8, "max_tokens": 1}
    reply = await post(service.app, COMPLETIONS, body)
    assert len(made) == 49 + 48 and all("tokenizer" in name for name in made)
    choices = reply.json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [50] * 8 + [49] * 8
    assert choices[0]["prompt_logprobs"] == choices[7]["prompt_logprobs"] != choices[8]["prompt_logprobs"]
    made.clear()
    echoing = {"prompt": prompt, "echo": True, "logprobs": 5, "n": 8, "max_tokens": 3, "seed": 1}
    reply = await post(service.app, COMPLETIONS, echoing)
    assert len(made) == 50 + 8 * 3 and all("tokenizer" in name for name in made)
    (alone,) = (await post(service.app, COMPLETIONS, {**echoing, "n": 1})).json()["choices"]
    first = reply.json()["choices"][0]
    assert first["logprobs"] == alone["logprobs"] and len(first["logprobs"]["tokens"]) == 53
    made.clear()
    assert (await post(service.app, COMPLETIONS, {"prompt": "a b", "logprobs": 2})).status == 200
    assert set(made) == {"MainThread"}, "what is small is made at once"
