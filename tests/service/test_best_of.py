"""`best_of` without beams: so many samples are made, and the best n come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from quire.service.text.tokenizer import Tokenizer
from tests.service.asgi import get, post
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio
COMPLETION = ("/v1/completions", {"prompt": "x"})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
BOTH = pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT])


@pytest.fixture
def sampling(make_service: Callable[..., Service], tokenizer: Tokenizer) -> Service:
    """Samples "a", "bbbbbb", "cccccc" and "ddd", of which "cccccc" is best by mean, "a" by sum."""
    said = [tokenizer.encode(text, add_special_tokens=False) for text in ("a<|end|>", "b", "c", "ddd<|end|>")]

    def script(prompt: list[int], params: Any, index: int) -> list[int]:
        return said[index % 4] * params.max_tokens

    service = make_service(script=script)
    service.engine.logprobs = [-0.4, -2.0, -0.3, -0.5]
    return service


def texts(reply: dict[str, Any]) -> list[str]:
    return [
        choice["text"] if "text" in choice else choice["message"]["content"] for choice in reply["choices"]
    ]


@BOTH
@pytest.mark.parametrize("n", [1, 2, 3, 4])
async def test_best_by_mean_come_back(sampling: Service, path: str, body: dict[str, Any], n: int) -> None:
    reply = await post(sampling.app, path, {**body, "max_tokens": 6, "n": n, "best_of": 4})
    answer = reply.json()
    assert texts(answer) == ["cccccc", "a", "ddd", "bbbbbb"][:n]
    assert [choice["index"] for choice in answer["choices"]] == list(range(n))
    assert [choice["finish_reason"] for choice in answer["choices"]] == (
        ["length", "stop", "stop", "length"][:n]
    )
    assert all(choice["logprobs"] is None for choice in answer["choices"])  # nobody asked for them
    assert not any("cumulative_logprob" in choice for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 2 + 6 + 6 + 4
    params = sampling.engine.streams[0].params
    assert (params.n, params.beam_width, params.logprobs) == (4, 0, 0)


@BOTH
async def test_logprobs_that_were_asked_for(sampling: Service, path: str, body: dict[str, Any]) -> None:
    asked = {"logprobs": 2} if "prompt" in body else {"logprobs": True, "top_logprobs": 2}
    reply = await post(sampling.app, path, {**body, **asked, "max_tokens": 6, "best_of": 4})
    (choice,) = reply.json()["choices"]
    assert sampling.engine.streams[0].params.logprobs == 2
    found = choice["logprobs"].get("token_logprobs") or [
        token["logprob"] for token in choice["logprobs"]["content"]
    ]
    assert found == [-0.3] * 6


async def test_echoed_prompt_does_not_count(sampling: Service) -> None:
    """It would favour short samples: each of its tokens has -0.5, more than any of theirs."""
    sampling.engine.logprobs = [-0.9, -0.6, -0.7, -0.8]
    body = {"prompt": "xyz" * 9, "max_tokens": 6, "n": 4, "best_of": 4, "echo": True, "logprobs": 0}
    reply = await post(sampling.app, "/v1/completions", body)
    assert [text.removeprefix("xyz" * 9) for text in texts(reply.json())] == ["bbbbbb", "cccccc", "ddd", "a"]
    assert all(len(choice["logprobs"]["tokens"]) > 27 for choice in reply.json()["choices"])


async def test_stop_string_ends_what_is_ranked(sampling: Service) -> None:
    body = {"prompt": "x", "max_tokens": 6, "n": 2, "best_of": 4, "stop": ["cc"]}
    reply = await post(sampling.app, "/v1/completions", body)
    assert texts(reply.json()) == ["", "a"]
    assert reply.json()["usage"]["completion_tokens"] == 2 + 6 + 2 + 4


async def test_several_prompts_are_ranked_apart(sampling: Service) -> None:
    body = {"prompt": ["x", "y"], "max_tokens": 6, "n": 2, "best_of": 4, "return_token_ids": True}
    reply = (await post(sampling.app, "/v1/completions", body)).json()
    assert texts(reply) == ["cccccc", "a"] * 2
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    prompts = [choice["prompt_token_ids"] for choice in reply["choices"]]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert reply["usage"]["prompt_tokens"] == 2


async def test_best_of_one_needs_no_logprobs(sampling: Service) -> None:
    reply = await post(sampling.app, "/v1/completions", {"prompt": "x", "max_tokens": 2, "best_of": 1})
    assert texts(reply.json()) == ["a"]
    assert sampling.engine.streams[0].params.logprobs is None


async def test_equally_good_samples_keep_their_order(sampling: Service) -> None:
    sampling.engine.logprobs = [-0.5]
    body = {"prompt": "x", "max_tokens": 6, "n": 3, "best_of": 4}
    assert texts((await post(sampling.app, "/v1/completions", body)).json()) == ["a", "bbbbbb", "cccccc"]


async def test_impossible_tokens_rank_last(sampling: Service) -> None:
    """A bias may force a token whose raw log-probability is -inf."""
    sampling.engine.logprobs = [-float("inf"), -2.0, -9.0, -float("inf")]
    body = {"prompt": "x", "max_tokens": 6, "n": 2, "best_of": 4}
    assert texts((await post(sampling.app, "/v1/completions", body)).json()) == ["bbbbbb", "cccccc"]


@BOTH
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"best_of": 1, "n": 2}, "at least n (2)"),
        ({"best_of": 2, "stream": True}, "stream"),
        ({"best_of": 2, "stream": True, "use_beam_search": False}, "stream"),
    ],
)
async def test_refused(
    service: Service, path: str, body: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    reply = await post(service.app, path, {**body, **more})
    assert (reply.status, reply.error["param"]) == (400, "best_of")
    assert words in reply.error["message"]
    assert not service.engine.streams


@BOTH
async def test_more_than_the_server_runs(
    make_service: Callable[..., Service], path: str, body: dict[str, Any]
) -> None:
    service = make_service()
    assert service.engine.info is not None
    service.engine.info = msgspec.structs.replace(service.engine.info, max_num_seqs=3)
    reply = await post(service.app, path, {**body, "best_of": 4, "n": 3, "max_tokens": 1})
    assert (reply.status, reply.error["param"]) == (400, "best_of")
    assert "at most 3 sequences" in reply.error["message"]


async def test_metrics_count_all_samples(sampling: Service) -> None:
    await post(sampling.app, "/v1/completions", {"prompt": "x", "max_tokens": 6, "best_of": 4})
    text = (await get(sampling.app, "/metrics")).body.decode()
    assert 'vllm:generation_tokens_total{model_name="tiny"} 18.0' in text
