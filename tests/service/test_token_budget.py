"""Without max_tokens each sample gets its share of a cache that is too small for a context each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests.server_process import serving
from tests.service.asgi import post
from tests.service.conftest import Service

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "x" * 90}]
SAMPLES = [2, 3, 5, 8, 16, 31, 64, 128]


def small(service: Service, num_blocks: int, max_model_len: int = 4096) -> Service:
    service.engine._info = replace(service.engine._info, num_blocks=num_blocks, max_model_len=max_model_len)
    service.engine.info = service.engine._info
    return service


@pytest.mark.anyio
@pytest.mark.parametrize("n", SAMPLES)
async def test_samples_share_the_cache(make_service: Callable[..., Service], n: int) -> None:
    service = small(make_service(script=lambda prompt, params, index: prompt[:1] * params.max_tokens), 160)
    for fields in ({"n": n}, {"n": 1, "best_of": n}, {"n": n, "use_beam_search": True}):
        reply = await post(service.app, CHAT, {"messages": MESSAGES, **fields})
        assert reply.status == 200, reply.error
        stream = service.engine.streams[-1]
        capacity = service.engine._info.capacity
        assert stream.params.max_tokens == capacity.room(len(stream.prompt), n) >= 1
        told = [choice["finish_reason"] for choice in reply.json()["choices"]]
        assert told == ["length"] * fields["n"]


@pytest.mark.anyio
async def test_what_does_not_depend_on_the_cache_is_as_it_was(make_service: Callable[..., Service]) -> None:
    """A large cache gives the rest of the context to each, and a completion's 16 stay 16 where they fit."""
    service = small(make_service(), 10_000, 400)
    for path, body in ((CHAT, {"messages": MESSAGES, "n": 4}), (COMPLETIONS, {"prompt": "x" * 90, "n": 4})):
        assert (await post(service.app, path, body)).status == 200
    chat, completion = service.engine.streams
    assert chat.params.max_tokens == 400 - len(chat.prompt)
    assert completion.params.max_tokens == 16
    small(service, 40)
    assert (await post(service.app, COMPLETIONS, {"prompt": "x" * 90, "n": 30})).status == 200
    tight = service.engine.streams[-1]
    assert tight.params.max_tokens == service.engine._info.capacity.room(len(tight.prompt), 30) < 16


@pytest.mark.anyio
async def test_what_cannot_be_shared_names_the_field(make_service: Callable[..., Service]) -> None:
    service = small(make_service(), 32)
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"n": 128}, "n", "at most"),
        ({"best_of": 128}, "best_of", "at most"),
        ({"n": 128, "use_beam_search": True}, "n", "at most"),
        ({"n": 8, "max_tokens": 400}, "max_tokens", "for each of so many"),
        ({"n": 8, "max_completion_tokens": 400}, "max_completion_tokens", "for each of so many"),
    ]
    for fields, param, words in refused:
        reply = await post(service.app, CHAT, {"messages": MESSAGES, **fields})
        assert (reply.status, reply.error["param"]) == (400, param)
        assert words in reply.error["message"]
    assert (await post(service.app, RESPONSES, {"input": "x" * 90})).status == 200
    most = int(
        (await post(service.app, CHAT, {"messages": MESSAGES, "n": 128}))
        .error["message"]
        .split("at most ")[1]
        .split()[0]
    )
    assert (await post(service.app, CHAT, {"messages": MESSAGES, "n": most})).status == 200
    assert (await post(service.app, CHAT, {"messages": MESSAGES, "n": most + 1})).status == 400


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 5}, "max_completion_tokens"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 5}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_completion_tokens": 5}, "max_completion_tokens"),
        (RESPONSES, {"input": "a", "max_output_tokens": 5}, "max_output_tokens"),
    ],
)
async def test_a_limit_is_called_as_it_was_given(
    service: Service, path: str, body: dict[str, Any], limit: str
) -> None:
    least = await post(service.app, path, body | {"min_tokens": 9})
    assert least.error["message"] == f"min_tokens must not exceed {limit} (5), got 9"
    none = await post(service.app, path, body | {limit: 0})
    assert none.status == 400 and none.error["param"] == limit and limit in none.error["message"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--num-gpu-blocks-override", "150") as url:
        yield url


@pytest.mark.parametrize("n", SAMPLES[1::3])
def test_a_real_engine_runs_them_all(url: str, n: int) -> None:
    messages = [{"role": "user", "content": "What is a KV cache? " * 8}]
    reply = httpx.post(url + CHAT, json={"messages": messages, "n": n, "seed": 1}, timeout=300)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"]) == n
